"""VA-OPD (methods_core 3.2), with loops."""

import math
from collections.abc import Sequence

from tests.reference.rows import Numbers, Row, mean, siblings


def view_advantage(row: Row) -> list[float | None]:
    pairs = zip(row.scores["teacher"], row.scores["degraded"], strict=True)
    return [None if a is None or b is None else max(0.0, a - b) for a, b in pairs]


def sibling_weights(means: Sequence[float], *, tau: float = 1.0) -> Numbers:
    mu = mean(means)
    sigma = mean((m - mu) ** 2 for m in means) ** 0.5
    powers = [math.exp((m - mu) / (sigma + 1e-6) / tau) for m in means]
    return [p / sum(powers) for p in powers]


def token_weights(scores: Sequence[float], *, p_v: float, lam: float, uniform: bool = False) -> Numbers:
    num_high = max(1, math.ceil(p_v * len(scores)))
    order = sorted(range(len(scores)), key=lambda t: -scores[t])  # sorted() is stable, so ties keep token order
    high = set(order[:num_high])
    num_low = len(scores) - num_high
    if uniform and not any(scores):
        return [1 / len(scores)] * len(scores)
    if num_low == 0:
        return [1 / num_high] * len(scores)
    return [lam / num_high if t in high else (1 - lam) / num_low for t in range(len(scores))]


def coefficients(
    rows: Sequence[Row], *, tau: float = 1.0, p_v: float = 0.2, lam: float = 0.5, uniform: bool = False
) -> list[Numbers]:
    out = []
    for row in rows:
        family = [r for r in siblings(rows, row) if any(a is not None for a in view_advantage(r))]
        if not any(r is row for r in family):
            out.append([0.0] * row.length)
            continue
        known = [[a for a in view_advantage(r) if a is not None] for r in family]
        shares = sibling_weights([mean(a) for a in known], tau=tau)
        own = next(i for i, r in enumerate(family) if r is row)
        split = iter(token_weights(known[own], p_v=p_v, lam=lam, uniform=uniform))
        out.append([0.0 if a is None else shares[own] * next(split) for a in view_advantage(row)])
    return out
