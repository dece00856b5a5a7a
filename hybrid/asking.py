"""How a training talks with its teachers: asks them while the student works, shows what they see, adds up their work.

Every function that gathers is called by all processes of a run, whether or not they had a row for a teacher.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from hybrid.collect import Scorer, row_of, unchanged
from hybrid.rollouts import Rollout
from hybrid.together import from_all, num_processes
from teachers.errors import TeacherError, TeacherUnavailable
from teachers.protocol import Row, Teacher
from teachers.router import teacher_gaps
from teachers.scores import TeacherScores

Answer = TypeVar("Answer")
"""Scores, or what gives them."""


def together(ask: Callable[[], dict[str, Answer]]) -> dict[str, Answer]:
    """What `ask` gives; a teacher that fails one process fails them all, so that none waits for another.

    Raises:
      TeacherError: of this process, or of another one.
    """
    if num_processes() == 1:
        return ask()
    error: TeacherError | None = None
    answers: dict[str, Answer] = {}
    try:
        answers = ask()
    except TeacherError as found:
        error = found
    said = [text for text in from_all(None if error is None else str(error)) if text is not None]
    if error is not None:
        raise error
    if said:
        raise TeacherUnavailable(f"another process could not have its rows scored: {said[0]}")
    return answers


def prompts_shown(
    scorers: Mapping[str, Scorer], own: Sequence[Rollout], everyone: Sequence[Rollout], tokenizer: Any
) -> list[str]:
    """One prompt of each view that is not the student's own, as its scorer sees it, for a person to read once.

    Args:
      scorers: by view.
      own: rows of this process.
      everyone: rows of all processes.
      tokenizer: the student's.

    Returns:
      A text for each such view, and where several teachers score it, one for each of them.
    """
    shown = []
    for view, scorer in scorers.items():
        if scorer.context is unchanged:
            continue
        prompts = scorer.context(own, everyone)
        rows = [row_of(rollout, prompt) for rollout, prompt in zip(own, prompts, strict=True) if prompt is not None]
        for who, teacher, row in seen_first(scorer.teacher, rows):
            reader = getattr(teacher, "tokenizer", None) or tokenizer
            shown.append(f"the {who}view {view} sees: {reader.decode(row.prompt_ids)!r}")
    return shown


def seen_first(teacher: Teacher, rows: Sequence[Row]) -> list[tuple[str, Teacher, Row]]:
    """The first row as a teacher sees it, or as each of several teachers does, with the words that name each.

    A teacher that none of the rows asks for is shown with one that it could see.
    """
    if not hasattr(teacher, "seen"):
        return [("", teacher, row) for row in rows[:1]]
    several: Any = teacher
    found = []
    for (name, asked), part in zip(several.seen(rows).items(), several.inner_teachers, strict=True):
        sights = [*asked.values(), *(row.seen(name) for row in rows)]
        found += [(f"teacher {name} of the ", part, row) for row in sights if row is not None][:1]
    return found


def teacher_metrics(
    scored: Mapping[str, TeacherScores], student_logprob_BT: Float[Tensor, "B T"] | None
) -> dict[str, float]:
    """What teachers did in a step, over all processes.

    Args:
      scored: by view.
      student_logprob_BT: of the same tokens, in nats; None where it was not measured.

    Returns:
      For each view "VIEW/failed_rows" and what asking cost, summed; and where several teachers stand behind it, each
      one's share of the scored rows and its mean gap to the student in nats: "VIEW/NAME/share", "VIEW/NAME/gap".
    """
    sums: dict[str, float] = {}
    names = set()
    for view, scores in scored.items():
        sums[f"{view}/failed_rows"] = float(len(scores.failures))
        sums |= {f"{view}/{key}": float(value) for key, value in scores.stats.items() if key != "failed_rows"}
        names |= {(view, name) for name in scores.parts}
        if student_logprob_BT is not None:
            for name, (gap, num_tokens) in teacher_gaps(scores, student_logprob_BT).items():
                sums |= {f"{view}/{name}/gap": gap, f"{view}/{name}/gap_tokens": float(num_tokens)}
    told = from_all((sums, names))
    metrics: dict[str, float] = {}
    for part, _ in told:
        for key, value in part.items():
            metrics[key] = metrics.get(key, 0.0) + value
    everyone = set().union(*(own for _, own in told))
    for view, name in sorted(everyone):
        num_tokens = metrics.pop(f"{view}/{name}/gap_tokens", 0.0)
        gap = metrics.pop(f"{view}/{name}/gap", 0.0)
        if num_tokens:
            metrics[f"{view}/{name}/gap"] = gap / num_tokens
        rows = sum(metrics.get(f"{view}/{other}/rows", 0.0) for one, other in everyone if one == view)
        metrics[f"{view}/{name}/share"] = metrics.get(f"{view}/{name}/rows", 0.0) / rows if rows else 0.0
    return metrics
