"""Token losses and reductions, with loops."""

import math
from collections.abc import Sequence

from tests.reference.rows import Numbers, Row, mean


def surrogate(
    a: float, lp: float, old: float, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> float:
    ratio = math.exp(max(-20.0, min(20.0, lp - old)))
    loss = max(-a * ratio, -a * max(1 - low, min(1 + high, ratio)))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


def policy_token_mean(
    rows: Sequence[Row],
    advantages: Sequence[Numbers],
    current: Sequence[Numbers],
    *,
    known: Sequence[Sequence[bool]] | None = None,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> float:
    """Sum over tokens / number of known tokens."""
    total, count = 0.0, 0
    for i, row in enumerate(rows):
        for t in range(row.length):
            if known is None or known[i][t]:
                total += surrogate(advantages[i][t], current[i][t], row.student[t], low=low, high=high, dual=dual)
                count += 1
    return total / max(count, 1)


def prompt_mean(rows: Sequence[Row], coefficients: Sequence[Numbers], divergence: Sequence[Numbers]) -> float:
    """Mean over prompts of the weighted sum."""
    sums: dict[int, float] = {}
    for row, c, d in zip(rows, coefficients, divergence, strict=True):
        sums[row.group] = sums.get(row.group, 0.0) + sum(a * b for a, b in zip(c, d, strict=True))
    return mean(sums.values())
