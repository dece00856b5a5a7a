"""OPDVR, GRPD and R2-OPD (methods_core 1.2, 1.6 and 1.7), with loops."""

import math
import statistics
from collections.abc import Sequence

from tests.reference.rewards import std
from tests.reference.rows import Numbers, Row, mean, siblings


def outcome(row: Row, thr: float) -> int:
    return 0 if row.reward is None else 1 if row.reward > thr else -1


def gate(r: float, z: int, *, inverse: bool = False) -> float:
    if z == 0:
        return 0.0
    keeps_positive = (z > 0) != inverse
    return max(r, 0.0) if keeps_positive else min(r, 0.0)


def clip(value: float, bound: float | None) -> float:
    return value if bound is None else max(-bound, min(bound, value))


def opdvr(
    rows: Sequence[Row],
    *,
    thr: float = 0.0,
    inverse: bool = False,
    truncated: str = "as_wrong",
    ratio_clip: float | None = None,
) -> list[Numbers]:
    out = []
    for row in rows:
        values = []
        for r in row.gap():
            if r is None or (row.truncated and truncated == "skip"):
                values.append(0.0)
            elif row.truncated and truncated == "vanilla_opd":
                values.append(clip(r, ratio_clip))
            else:
                values.append(gate(clip(r, ratio_clip), outcome(row, thr), inverse=inverse))
        out.append(values)
    return out


def correctness_advantage(rows: Sequence[Row], row: Row, *, thr: float, norm_by_std: bool) -> float:
    right = [1.0 if r.reward > thr else 0.0 for r in siblings(rows, row) if r.reward is not None]
    if row.reward is None or max(right) == min(right):
        return 0.0
    centred = (1.0 if row.reward > thr else 0.0) - mean(right)
    return centred / (std(right) + 1e-6) if norm_by_std else centred


def grpd_code(rows: Sequence[Row], *, thr: float = 0.0, norm_by_std: bool = False, u: float = 0.0) -> list[Numbers]:
    gated = opdvr(rows, thr=thr)
    sizes = [abs(correctness_advantage(rows, row, thr=thr, norm_by_std=norm_by_std)) + u for row in rows]
    return [[size * a for a in values] for size, values in zip(sizes, gated, strict=True)]


def grpd_sign(rows: Sequence[Row], *, thr: float = 0.0) -> list[Numbers]:
    out = []
    for row in rows:
        a = correctness_advantage(rows, row, thr=thr, norm_by_std=False)
        sign = (a > 0) - (a < 0)
        out.append([0.0 if r is None else gate(r, sign) for r in row.gap()])
    return out


def r2opd(rows: Sequence[Row], *, beta: float, eps: float = 1e-6, truncated: str = "vanilla_opd") -> list[Numbers]:
    out = []
    for row in rows:
        known = [r for r in row.gap() if r is not None]
        nu = max(statistics.median(abs(r) for r in known), eps) if known else eps
        z = 0 if row.truncated and truncated == "vanilla_opd" else outcome(row, 0.0)
        g = [1 / (1 + math.exp(-beta * z * r / nu)) for r in known]
        mass = sum(gt * abs(r) for gt, r in zip(g, known, strict=True))
        factor = sum(abs(r) for r in known) / mass if mass > 0 else 0.0
        if row.truncated and truncated == "skip":
            factor = 0.0
        weighted = iter([factor * gt * r for gt, r in zip(g, known, strict=True)])
        out.append([0.0 if r is None else next(weighted) for r in row.gap()])
    return out
