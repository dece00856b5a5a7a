"""A paired comparison in one plain sentence."""

import math

from hybrid.compare.statistics import PairedDifference, fewest_seeds, seeds_needed


def verdict(
    found: PairedDifference, *, method: str, baseline: str, wanted: float = 0.03, higher_is_better: bool = True
) -> str:
    """Says what a paired comparison shows, and if it shows nothing, what it would take.

    A difference is shown when the exact test after Holm's correction is below 1 minus the level; the interval is told
    and decides nothing. Runs that failed are always named.

    Args:
      found: of a share (accuracy, pass@k); told in points of a hundred.
      method: its name.
      baseline: its name.
      wanted: the difference that one would like to be able to see, in the unit of the shares.
      higher_is_better: False for lengths and losses.
    """
    mean, level = found.mean, f"{found.mean.level:.0%}".replace("%", " %")
    alpha = 1 - found.mean.level
    failed = ""
    if found.num_failed:
        num, verb = found.num_failed + found.num_pairs, "is" if found.num_failed == 1 else "are"
        failed = f"; {found.num_failed} of {num} pairs failed and {verb} in none of these numbers"
    if found.num_pairs == 0:
        return f"{method} and {baseline} cannot be compared: no pair of runs finished{failed}."
    points = f"{_points(mean.value)}"
    if found.num_pairs == 1:
        return f"nothing shown with one seed ({method} minus {baseline}: {points}){failed}."
    between = f"{level} interval {_number(mean.low)} to {_number(mean.high)}"
    if found.p_holm <= alpha and mean.value != 0:
        word = "better" if (mean.value > 0) == higher_is_better else "worse"
        return (
            f"{method} is {word} than {baseline} by {_points(abs(mean.value))} at {level} with {found.num_pairs} seeds "
            f"({between}; p = {found.p_holm:.2g}){failed}."
        )
    seen = f"{method} minus {baseline}: {points}, {between}; p = {found.p_holm:.2g}"
    least = fewest_seeds(mean.level, found.num_compared)
    if found.num_pairs < least:
        among = "" if found.num_compared == 1 else f" among {found.num_compared} comparisons"
        return (
            f"no difference can be shown at {level} with {found.num_pairs} seeds; the exact test needs at least "
            f"{least}{among} ({seen}){failed}."
        )
    return f"no difference shown at {level} with {found.num_pairs} seeds; {_needed(found, wanted)} ({seen}){failed}."


def _needed(found: PairedDifference, wanted: float) -> str:
    num = seeds_needed(found.sd, wanted, level=found.mean.level, num_compared=found.num_compared)
    if math.isinf(num):
        return f"over a million would be needed for {_points(wanted)}"
    if num <= found.num_pairs:
        return f"one of {_points(wanted)} would probably have been seen"
    return f"{num} would be needed for {_points(wanted)}"


def _number(share: float) -> str:
    return f"{100 * share:+.1f}"


def _points(share: float) -> str:
    text = f"{100 * share:.1f}".removesuffix(".0")
    return f"{text} point" if text in ("1", "-1") else f"{text} points"
