"""Group statistics, written from DeepSeekMath 4.1.1 with loops."""

from collections.abc import Sequence

from tests.reference.rows import Row, mean, scored, siblings


def std(values: Sequence[float]) -> float:
    """With n - 1."""
    if len(values) < 2:
        return 0.0
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def advantage(rows: Sequence[Row], row: Row, *, scale: str = "none", eps: float = 1e-4) -> float:
    group = scored(siblings(rows, row))
    if row.reward is None or max(group) == min(group):
        return 0.0
    centred = row.reward - mean(group)
    if scale == "none":
        return centred
    return centred / (std(group if scale == "group" else scored(rows)) + eps)


def kind(rows: Sequence[Row], row: Row, *, fail_thr: float = 0.0, finished_only: bool = False) -> str:
    """all_wrong, mixed, all_right or unscored: what RSTG routes by."""
    group = scored(r for r in siblings(rows, row) if not (finished_only and r.truncated))
    if not group:
        return "unscored"
    if max(group) - min(group) >= 1e-6:
        return "mixed"
    return "all_wrong" if max(group) <= fail_thr else "all_right"
