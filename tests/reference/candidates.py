"""The candidate sets of the top-k mode (methods_core 1.2; thunlp/OPD, compute_distillation_reward), with loops."""

import math
from collections.abc import Sequence

from tests.reference.opdvr import clip


def likeliest(logprobs: Sequence[float], top_k: int) -> list[int]:
    return sorted(range(len(logprobs)), key=lambda v: (-logprobs[v], v))[:top_k]


def candidates(student: Sequence[float], teacher: Sequence[float], support: str, top_k: int) -> list[int]:
    """Ids, from the whole distributions of both sides at one position."""
    own, theirs = likeliest(student, top_k), likeliest(teacher, top_k)
    if support == "student":
        return own
    if support == "teacher":
        return theirs
    if support == "intersection":
        return [v for v in own if v in theirs]
    return own + [v for v in theirs if v not in own]


def candidate_gaps(
    student: Sequence[float],
    teacher: Sequence[float],
    support: str,
    top_k: int,
    *,
    weighting: str = "student_p",
    ratio_clip: float | None = None,
) -> dict[int, float]:
    """The weighted gap of each candidate, by id."""
    ids = candidates(student, teacher, support, top_k)
    by = {"student_p": student, "teacher_p": teacher, "none": [0.0] * len(student)}[weighting]
    total = 1.0 if weighting == "none" else sum(math.exp(by[v]) for v in ids)
    return {v: math.exp(by[v]) / total * clip(teacher[v] - student[v], ratio_clip) for v in ids}
