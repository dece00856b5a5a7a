"""A reward as the trainer meets it: TRL's calling convention, and nothing but numbers or None coming out.

A failed verifier is an error, never a reward of 0: whatever a reward raises becomes a `RewardError` that names the
reward, the row and the cause, and so does a value that is no finite number.
"""

import asyncio
import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn

import torch

from hybrid.errors import RewardError
from hybrid.rewards.extract import completion_text

Completion = str | Sequence[dict[str, Any]]
Scorer = Callable[..., Any]

_LARGEST = torch.finfo(torch.float32).max
_EXCERPT = 80


class RewardFunction:
    """A TRL reward function that is checked on every call.

    Attributes:
      weight: the factor of this reward in the sum over rewards (TRL's `reward_weights`).
      columns: the data columns without which it cannot score.
      judged_answer: the answer that the verifier reads of a completion's text, in the verifier's own textual form;
        None where this reward reads no answer (a format, a user's function without such an attribute).
    """

    def __init__(
        self,
        name: str,
        score: Scorer,
        *,
        weight: float = 1.0,
        columns: tuple[str, ...] = (),
        judged_answer: Callable[[str], str | None] | None = None,
    ) -> None:
        """Wraps `score`, which takes what TRL passes; see `__call__`.

        Args:
          name: how errors and metrics call it.
          score: called with keywords `prompts`, `completions`, `completion_ids` and the columns; a coroutine function
            is run to its end.
          weight: see the class.
          columns: see the class.
          judged_answer: see the class.
        """
        self.__name__ = name
        self.weight = weight
        self.columns = columns
        self.judged_answer = judged_answer
        self._score = _awaited(score) if _is_async(score) else score

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Scores a batch of B completions.

        Args:
          prompts: B prompts, strings or lists of chat messages.
          completions: B completions, strings or lists of chat messages.
          completion_ids: B lists of token ids.
          **columns: the data set's other columns, each a list of B values, and TRL's own extras.

        Returns:
          B rewards; None where this reward does not apply to the row.

        Raises:
          RewardError: a column is missing, the reward raised, or it returned something else than B finite numbers or
            Nones. Names the reward and, where one is to blame, the row.
        """
        if missing := [column for column in self.columns if column not in columns]:
            present = sorted(name for name in columns if name not in ("trainer_state", "log_extra", "log_metric"))
            raise RewardError(
                f"reward '{self.__name__}' needs the column '{missing[0]}', which the data set does not have; it has: "
                f"{', '.join(present) or 'no other column than the prompt'}"
            )
        batch = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        raised = Raised()
        values: Any = None
        with raised:
            values = _listed(self._score(**batch))
        if raised.error is not None:
            self._blame(batch, raised.error)
        if not isinstance(values, list):
            raise RewardError(
                f"reward '{self.__name__}' returned a {type(values).__name__}; return a list of one number or None per "
                "completion"
            )
        if len(values) != len(completions):
            raise RewardError(
                f"reward '{self.__name__}' returned {len(values)} values for {len(completions)} completions; return "
                "one number or None per completion"
            )
        return [self._number(value, row, completions[row]) for row, value in enumerate(values)]

    def _number(self, value: Any, row: int, completion: Completion) -> float | None:
        if value is None:
            return None
        plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        if not isinstance(plain, numbers.Real):
            problem = f"a {type(value).__name__} ({value!r:.40})"
        elif -_LARGEST <= plain <= _LARGEST:  # pyright: ignore[reportOperatorIssue]
            return float(plain)
        else:
            problem = f"{plain!s:.40}, which is not finite in float32"
        raise RewardError(
            f"reward '{self.__name__}' returned {problem} for {_row_name(row, completion)}; return a finite number, or "
            "None where the reward does not apply"
        )

    def _blame(self, batch: dict[str, Any], error: Exception) -> NoReturn:
        """Finds the row that raises by itself; a reward is a function of its row, so asking again is harmless."""
        count = len(batch["completions"])
        culprit, where = error, f"the batch of {count} rows, and on none of them alone"
        for row in range(count):
            alone = {
                name: value[row : row + 1] if isinstance(value, Sequence) and len(value) == count else value
                for name, value in batch.items()
            }
            raised = Raised()
            with raised:
                _listed(self._score(**alone))
            if raised.error is not None:
                culprit, where = raised.error, _row_name(row, batch["completions"][row])
                break
        said = str(culprit) if isinstance(culprit, RewardError) else f"raised {type(culprit).__name__}: {culprit}"
        raise RewardError(
            f"reward '{self.__name__}': {said}; on {where}. A failed verifier stops the run, since a reward of 0 would "
            "teach the wrong thing"
        ) from culprit


class Raised:
    """Keeps what foreign code raises, so that it can be told with the row; `KeyboardInterrupt` and the like pass."""

    error: Exception | None = None

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        """Keeps an `Exception` and ends it here."""
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def _listed(values: Any) -> Any:
    """A list of what an iterable of values holds; anything else as it is, for the message."""
    is_values = isinstance(values, Iterable) and not isinstance(values, str | bytes | dict)
    return list(values) if is_values else values


def _row_name(row: int, completion: Completion) -> str:
    text = completion_text(completion)
    return f"row {row} (completion {text if len(text) <= _EXCERPT else text[:_EXCERPT] + '...'!r})"


def _is_async(score: Scorer) -> bool:
    return inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(getattr(score, "__call__", None))  # noqa: B004


def _awaited(score: Scorer) -> Scorer:
    """Runs a coroutine function in a thread of its own, which works whether or not the caller has a running loop."""

    def run(**batch: Any) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread:
            return thread.submit(asyncio.run, score(**batch)).result()

    return run
