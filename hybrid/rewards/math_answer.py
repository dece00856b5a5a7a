r"""Mathematical answers: which part of a completion is judged, and when it equals the reference.

The rule is strict: the last complete box after the thinking block, reference first. Equal texts and plain numbers are
decided here; everything else goes to math-verify in a worker that can be killed.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from hybrid.errors import RewardError
from hybrid.rewards.extract import after_thinking, completion_text, last_box, without_text_macro
from hybrid.rewards.pool import WorkerPool

Percent = Literal["either", "fraction"]

_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.(\d+))?", re.ASCII)
_ROUNDED_DECIMALS = 6  # math-verify compares floats rounded to this many decimals


def plain_verdict(gold: str, answer: str) -> bool | None:
    """The verdict on equal texts and on plain numbers, which needs no computer algebra.

    Args:
      gold: the reference answer.
      answer: the student's answer.

    Returns:
      Whether they are equal, or None where only math-verify can tell.
    """
    if gold == answer:
        return True
    gold_number, answer_number = _NUMBER.fullmatch(gold), _NUMBER.fullmatch(answer)
    if not gold_number or not answer_number:
        return None
    if Decimal(gold.replace(",", "")) == Decimal(answer.replace(",", "")):
        return True
    exact = max(len(gold_number[1] or ""), len(answer_number[1] or "")) <= _ROUNDED_DECIMALS
    return False if exact else None


class MathReward:
    """1.0 where the judged answer equals the reference, else 0.0; see `MathConfig` for the settings."""

    def __init__(
        self,
        *,
        answer_column: str,
        require_box: bool,
        prompt_opens_thinking: bool,
        percent: Percent,
        limit_s: float,
        workers: int,
    ) -> None:
        """Starts no process yet."""
        self._answer_column = answer_column
        self._require_box = require_box
        self._prompt_opens_thinking = prompt_opens_thinking
        self._percent = percent
        self._pool = WorkerPool("math", workers=workers, limit_s=limit_s)

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Scores a batch; equal questions are asked once.

        Raises:
          RewardError: a reference is missing or is nothing that math-verify can read.
        """
        golds = [reference_text(value, self._answer_column) for value in columns[self._answer_column]]
        judged = [self.judged_answer(completion_text(completion)) for completion in completions]
        pairs = [
            (clean_gold(gold), None if answer is None else _clean(answer))
            for gold, answer in zip(golds, judged, strict=True)
        ]
        verdicts = {
            (gold, answer): False if answer is None else plain_verdict(gold, answer) for gold, answer in set(pairs)
        }
        open_pairs = sorted(pair for pair, verdict in verdicts.items() if verdict is None)
        requests = [{"gold": gold, "answer": answer, "percent": self._percent} for gold, answer in open_pairs]
        replies = dict(zip(open_pairs, self._pool.ask_all(requests), strict=True))
        for (gold, answer), reply in replies.items():
            if reply is not None and "unreadable_gold" in reply:
                raise RewardError(
                    f"math-verify cannot read the reference {gold!r} in column '{self._answer_column}'; correct or "
                    "drop the row, or use the reward 'exact'"
                )
            verdicts[gold, answer] = reply is not None and reply["equal"]
        if log_metric := columns.get("log_metric"):
            late = sum(pair in replies and replies[pair] is None for pair in pairs)
            log_metric("math/beyond_limit", late / len(pairs))
        return [float(bool(verdicts[pair])) for pair in pairs]

    def judged_answer(self, text: str) -> str | None:
        """The answer that is judged: the last complete box, or what math-verify finds if no box is required."""
        answer = after_thinking(text, prompt_opens_thinking=self._prompt_opens_thinking)
        if answer is None:
            return None
        box = last_box(answer)
        if box is not None:
            return without_text_macro(box) or None
        if self._require_box or not answer.strip():
            return None
        if _NUMBER.fullmatch(answer.strip()):
            return answer.strip()
        reply = self._pool.ask({"text": answer})
        return reply["found"] if reply else None


def reference_text(value: Any, column: str) -> str:
    """The text of a reference answer.

    Args:
      value: a string or a number, as the data has it.
      column: its column, for the message.

    Raises:
      RewardError: it is missing, blank, or neither string nor number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise RewardError(
            f"column '{column}' holds {value!r:.60} where the reference answer, a text or a number, is due"
        )
    return str(value).strip()


def clean_gold(gold: str) -> str:
    """The reference as a student would box it: without its own box and without dollar signs around it."""
    box = last_box(gold)
    return _clean(gold if box is None else without_text_macro(box))


def _clean(answer: str) -> str:
    """Without the marks that mean nothing to the value: surrounding dollars or parentheses of LaTeX, a full stop."""
    answer = answer.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = answer[len(opening) : -len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) > 2 and "$" not in inner:
            answer = inner.strip()
    return answer.removesuffix(".").strip() or answer
