"""SIPO (methods_core 2.2), with loops."""

import bisect
import math
from collections.abc import Sequence

from tests.reference.rewards import advantage
from tests.reference.rows import Numbers, Row, Scores, mean, scored, siblings

EDGES = (-4.0, -2.0, -1.0, -0.5, -0.2, -0.05)


def evidence(row: Row, kind: str) -> Scores:
    other = row.scores["wrong"] if kind == "contrast" else row.student
    return [None if a is None or b is None else a - b for a, b in zip(row.scores["right"], other, strict=True)]


def centred(rows: Sequence[Row], raw: list[Scores], means: dict[int, float]) -> tuple[list[Scores], dict[int, float]]:
    """Evidence less its running mean in the bucket of the student's log-prob, and the means after this batch."""
    buckets: dict[int, list[float]] = {}
    for row, values in zip(rows, raw, strict=True):
        for lp, e in zip(row.student, values, strict=True):
            if e is not None:
                buckets.setdefault(bisect.bisect_left(EDGES, lp), []).append(e)
    after = dict(means)
    for bucket, values in buckets.items():
        if len(values) >= 8:
            new = mean(values)
            after[bucket] = 0.9 * means[bucket] + 0.1 * new if bucket in means else new
    out = []
    for row, values in zip(rows, raw, strict=True):
        out.append(
            [
                None if e is None else e - after.get(bisect.bisect_left(EDGES, lp), 0.0)
                for lp, e in zip(row.student, values, strict=True)
            ]
        )
    return out, after


def failed(rows: Sequence[Row], row: Row, thr: float) -> bool:
    group = scored(siblings(rows, row))
    return row.reward is not None and max(group) < thr


def reward_advantage(rows: Sequence[Row], *, s: float, thr: float) -> Numbers:
    plain = [advantage(rows, row) for row in rows]
    wrong_in_mixed = [
        abs(a)
        for a, row in zip(plain, rows, strict=True)
        if row.reward is not None and row.reward < thr and not failed(rows, row, thr)
    ]
    if s == 0 or not wrong_in_mixed:
        return plain
    return [-s * mean(wrong_in_mixed) if failed(rows, row, thr) else a for a, row in zip(plain, rows, strict=True)]


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def additive_token(a: float, e: float | None, *, kappa: float, eps: float) -> float:
    value = a + (0.0 if e is None else kappa * clip(e, -eps, eps))
    if a > 0:
        return max(value, 0.0)
    return min(value, 0.0) if a < 0 else value


def multiplicative_token(a: float, e: float | None, *, lam: float, eps: float) -> float:
    sign = (a > 0) - (a < 0)
    return a if e is None else a * ((1 - lam) + lam * clip(math.exp(sign * e), 1 - eps, 1 + eps))


def sipo(
    rows: Sequence[Row],
    *,
    form: str = "additive",
    kappa: float = 0.5,
    eps: float = 0.2,
    lam: float = 0.5,
    kind: str = "contrast",
    baseline: str = "none",
    means: dict[int, float] | None = None,
    negative_only: bool = False,
    all_wrong_kappa: float = 0.0,
    s: float = 0.0,
    thr: float = 0.5,
) -> list[Numbers]:
    raw = [evidence(row, kind) for row in rows]
    if baseline == "confidence":
        raw, _ = centred(rows, raw, means or {})
    out = []
    for row, a, values in zip(rows, reward_advantage(rows, s=s, thr=thr), raw, strict=True):
        tokens = []
        for e in values:
            if form == "additive":
                e = None if negative_only and a > 0 else e
                tokens.append(additive_token(a, e, kappa=kappa, eps=eps))
            else:
                moved = None if negative_only and a >= 0 else e
                value = multiplicative_token(a, moved, lam=lam, eps=eps)
                if e is not None and failed(rows, row, thr):
                    value += all_wrong_kappa * clip(e, -eps, eps)
                tokens.append(value)
        out.append(tokens)
    return out
