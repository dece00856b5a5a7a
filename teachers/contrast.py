"""Which right and wrong context each response of a group is shown; pure functions of what the verifier said."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from teachers.errors import TeacherError


def contrast_answers(
    judged: Sequence[str | None],
    correct: Sequence[bool | None],
    reference: str,
    negative: Literal["own", "mode"] = "own",
    unjudged: Literal["skip", "mode"] = "skip",
) -> list[tuple[str, str] | None]:
    """Pairs of a right and a wrong answer for the responses of one group.

    A wrong response is contrasted with the answer that it arrived at itself; a right one with the group's most common
    wrong answer (of equals, the one seen first). An answer that equals the reference is never a wrong one, whatever
    the verifier disliked about the response.

    Args:
      judged: the answer that the verifier read in each response; None where it read none.
      correct: the verifier's outcome; None for a response without one, which gets no pair and lends no answer.
      reference: the data set's answer, in the form in which the verifier reports answers.
      negative: "own" as above, or "mode": every response is shown the group's most common wrong answer.
      unjudged: what a wrong response without a wrong answer of its own gets under "own": nothing ("skip"), or the
        group's most common wrong answer ("mode").

    Returns:
      For each response (right answer, wrong answer), or None where the teacher has nothing to say.

    Raises:
      TeacherError: an option is unknown.
      ValueError: the sequences differ in length.

    Reference:
      SIPO's repository, contrast context "answer" (arXiv 2609.36742). Differs: responses without an outcome are left
      out.
    """
    if negative not in ("own", "mode") or unjudged not in ("skip", "mode"):
        raise TeacherError(
            f"negative must be 'own' or 'mode' and unjudged 'skip' or 'mode'; got {negative!r}, {unjudged!r}"
        )
    wrong = [
        answer if ok is False and answer is not None and answer.strip() != reference.strip() else None
        for answer, ok in zip(judged, correct, strict=True)
    ]
    # Counter keeps the order of first sight among equals
    most_common = next(iter(Counter(answer for answer in wrong if answer is not None).most_common(1)), (None, 0))[0]

    def shown(own: str | None, ok: bool | None) -> str | None:
        if ok is None:
            return None
        if negative == "mode" or ok:
            return most_common
        return own if own is not None or unjudged == "skip" else most_common

    chosen = [shown(own, ok) for own, ok in zip(wrong, correct, strict=True)]
    return [None if answer is None else (reference, answer) for answer in chosen]


def contrast_trajectories(responses: Sequence[str], correct: Sequence[bool | None]) -> list[tuple[int, int] | None]:
    """Pairs of a successful and a failed sibling for the responses of one group.

    The sibling is taken round robin by the response's position in the group, and is never the response itself. A
    response that is empty once its thinking is taken out (`without_thinking`) shows nothing and is no sibling.

    Args:
      responses: the texts of the group.
      correct: the verifier's outcome; None for a response without one.

    Returns:
      For each response (index of a successful sibling, index of a failed one), or None where either is missing.

    Raises:
      ValueError: the sequences differ in length.

    Reference:
      SIPO's repository, contrast context "trajectory" (arXiv 2609.36742). Differs: responses without an outcome get no
      pair, and an empty response is passed over.
    """
    tells = [bool(without_thinking(text)) for text in responses]
    good = [i for i, (ok, said) in enumerate(zip(correct, tells, strict=True)) if ok is True and said]
    bad = [i for i, (ok, said) in enumerate(zip(correct, tells, strict=True)) if ok is False and said]

    def sibling(row: int, among: Sequence[int]) -> int | None:
        others = [i for i in among if i != row]
        return others[row % len(others)] if others else None

    pairs = [
        (sibling(row, good), sibling(row, bad)) if ok is not None else (None, None) for row, ok in enumerate(correct)
    ]
    return [None if plus is None or minus is None else (plus, minus) for plus, minus in pairs]


def without_thinking(text: str, opening: str = "<think>", closing: str = "</think>") -> str:
    """The text without its thinking blocks, stripped of white space around it.

    A block that the prompt has opened ends with the first `closing`; one that is never closed takes all that follows.

    Args:
      text: a response.
      opening: begins a block.
      closing: ends it.
    """
    first_close, first_open = text.find(closing), text.find(opening)
    if first_close >= 0 and (first_open < 0 or first_close < first_open):
        text = text[first_close + len(closing) :]
    text = re.sub(f"{re.escape(opening)}.*?(?:{re.escape(closing)}|\\Z)", "", text, flags=re.DOTALL)
    return text.strip()
