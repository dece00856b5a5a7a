"""reasoning-gym's own verifiers: the record that travels in a column of the data, and the reward that reads it."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from hybrid.errors import RewardError
from hybrid.rewards.extract import ANSWER_PLACES, AnswerPlace, after_thinking, completion_text
from hybrid.rewards.pool import WorkerPool
from hybrid.rewards.worker import packed

GYM_COLUMN = "reasoning_gym"

_LOG = logging.getLogger(__name__)


def gym_record(task: str, params: dict[str, Any], entry: dict[str, Any]) -> str:
    """What the verifier needs of one problem, as JSON from which tuples and number keys come back as they were.

    Args:
      task: a registered name of reasoning-gym.
      params: what its data set was made with.
      entry: the problem, as the data set gave it.

    Returns:
      The text for the column `reasoning_gym`.

    Raises:
      TypeError: the entry holds something that JSON cannot carry.
    """
    return json.dumps(packed({"task": task, "params": params, "entry": entry}))


class GymReward:
    """The score of the task's own `score_answer`, in [0, 1]; see `ReasoningGymConfig` for the settings."""

    def __init__(
        self,
        *,
        answer_in: AnswerPlace,
        success_at: float | None,
        prompt_opens_thinking: bool,
        limit_s: float,
        workers: int,
    ) -> None:
        """Starts no process yet."""
        self._find = ANSWER_PLACES[answer_in]
        self._success_at = success_at
        self._prompt_opens_thinking = prompt_opens_thinking
        self._pool = WorkerPool("gym", workers=workers, limit_s=limit_s)
        self._warned = False

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Scores a batch; equal questions are asked once.

        Raises:
          RewardError: a row has no record of a reasoning-gym problem.
          RuntimeError: the verifier raises even on the problem's own reference answer.
        """
        records = columns[GYM_COLUMN]
        for record in records:
            if not isinstance(record, str):
                raise RewardError(f"column '{GYM_COLUMN}' holds {record!r:.60} where a reasoning-gym record is due")
        answers = [self.judged_answer(completion_text(completion)) for completion in completions]
        pairs = list(zip(records, answers, strict=True))
        asked = sorted({(record, answer) for record, answer in pairs if answer is not None})
        requests = [{"record": record, "answer": answer} for record, answer in asked]
        replies: dict[Any, dict[str, Any] | None] = dict(zip(asked, self._pool.ask_all(requests), strict=True))
        self._tell(replies, pairs, columns)
        scores = [(replies.get(pair) or {"score": 0.0})["score"] for pair in pairs]  # no answer, or beyond the limit
        return scores if self._success_at is None else [float(score >= self._success_at) for score in scores]

    def judged_answer(self, text: str) -> str | None:
        """The answer that is handed to the task's verifier."""
        answer = after_thinking(text, prompt_opens_thinking=self._prompt_opens_thinking)
        return None if answer is None else self._find(answer) or None

    def _tell(self, replies: dict[Any, dict[str, Any] | None], pairs: list[Any], columns: dict[str, Any]) -> None:
        unreadable = [pair for pair in pairs if "unreadable" in (replies.get(pair) or {})]
        if unreadable and not self._warned:
            self._warned = True
            _LOG.warning(
                "reasoning-gym's verifier raised on the answer %r (%s) and accepts the reference, so the answer counts "
                "as wrong; later ones are counted in the metric reasoning_gym/unreadable",
                unreadable[0][1],
                (replies[unreadable[0]] or {})["unreadable"],
            )
        if log_metric := columns.get("log_metric"):
            late = sum(pair in replies and replies[pair] is None for pair in pairs)
            log_metric("reasoning_gym/beyond_limit", late / len(pairs))
            log_metric("reasoning_gym/unreadable", len(unreadable) / len(pairs))
