"""RSTG (methods_core 4.2), with loops."""

import math
from collections.abc import Sequence

from tests.reference.rewards import advantage, kind
from tests.reference.rows import Numbers, Row, mean


def quantile(values: Sequence[float], q: float) -> float:
    """With linear interpolation."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def unit(values: Sequence[float]) -> Numbers:
    low, high = min(values), max(values)
    if high - low <= 1e-15:
        return [0.0] * len(values)
    return [(v - low) / (high - low) for v in values]


def scores(entropy: Sequence[float], gap: Sequence[float], percentile: float | None) -> Numbers:
    if percentile is not None:
        bound = quantile(entropy, percentile / 100)
        entropy = [min(h, bound) for h in entropy]
    h, d = unit(entropy), unit([abs(g) for g in gap])
    return [a + b - a * b for a, b in zip(h, d, strict=True)]


def top(values: Sequence[float], percent: float) -> set[int]:
    order = sorted(range(len(values)), key=lambda t: -values[t])
    return set(order[: math.ceil(percent * len(values) / 100)])


def beta_at(k: int, *, beta_init: float = 5e-3, delta: float = 5e-5, beta_min: float = 1e-3) -> float:
    return max(beta_min, beta_init - delta * k)


def rstg(
    rows: Sequence[Row],
    *,
    k: int,
    percent: float = 50.0,
    scope: str = "batch",
    percentile: float | None = 98.0,
    scale: str = "group",
    fail_thr: float = 0.0,
    exclude_truncated: bool = False,
    finished_only: bool = False,
) -> list[Numbers]:
    kinds = [kind(rows, row, fail_thr=fail_thr, finished_only=finished_only) for row in rows]
    guided = [  # (row, token, entropy, gap), in order
        (i, t, row.entropy[t], r)
        for i, row in enumerate(rows)
        if kinds[i] == "all_wrong" and not (exclude_truncated and row.truncated)
        for t, r in enumerate(row.gap())
        if r is not None
    ]
    kept: set[tuple[int, int]] = set()
    if guided:
        score = scores([g[2] for g in guided], [g[3] for g in guided], percentile)
        blocks = [range(len(guided))]
        if scope == "response":
            blocks = [[n for n, g in enumerate(guided) if g[0] == i] for i in range(len(rows))]
        for block in blocks:
            chosen = top([score[n] for n in block], percent)
            kept |= {guided[n][:2] for place, n in enumerate(block) if place in chosen}
    out = []
    for i, row in enumerate(rows):
        if kinds[i] == "mixed":
            out.append([advantage(rows, row, scale=scale)] * row.length)
        else:
            gap = row.gap()
            weight = beta_at(k) * row.accuracy
            out.append([weight * float(gap[t] or 0.0) if (i, t) in kept else 0.0 for t in range(row.length)])
    return out


def imitated(rows: Sequence[Row]) -> list[Numbers]:
    """Log-probs of one text per all-wrong prompt that owns one."""
    texts: dict[int, Numbers] = {}
    for row in rows:
        if kind(rows, row) == "all_wrong" and row.text:
            texts.setdefault(row.group, row.text)
    return list(texts.values())


def sft_loss(rows: Sequence[Row]) -> float:
    return mean(mean(-lp for lp in text) for text in imitated(rows))
