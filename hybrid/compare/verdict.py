"""A paired comparison in one plain sentence."""

import math

from hybrid.compare.statistics import PairedDifference, fewest_seeds, seeds_needed


def verdict(
    found: PairedDifference,
    *,
    method: str,
    baseline: str,
    wanted: float = 0.03,
    steps: tuple[float, float] | None = None,
) -> str:
    """Says what a paired comparison shows, and if it shows nothing, what it would take.

    A difference is shown when the exact test after Holm's correction is below 1 minus the level; the interval is told
    and decides nothing, and where the two do not agree the sentence says so. Pairs without a result are always named.

    Args:
      found: of a share (accuracy, pass@k), of which more is better; told in points of a hundred.
      method: its name.
      baseline: its name.
      wanted: the difference that one would like to be able to see, in the unit of the shares.
      steps: after how many the two were measured, where these are not the same.
    """
    mean, level = found.mean, f"{found.mean.level:.0%}".replace("%", " %")
    alpha = 1 - found.mean.level
    rest = _rest(found, method, baseline, steps)
    if found.num_pairs == 0:
        return f"{method} and {baseline} cannot be compared: no pair of runs finished{rest}."
    if found.num_pairs == 1:
        return f"nothing shown with one seed ({method} minus {baseline}: {_points(mean.value)}){rest}."
    many = "" if found.num_compared == 1 else f" after correction for {found.num_compared} comparisons"
    is_shown = found.p_holm <= alpha and mean.value != 0
    leaves_out = mean.low > 0 or mean.high < 0
    disagrees = "" if leaves_out == is_shown else f", which {'leaves out' if leaves_out else 'holds'} 0"
    between = f"{level} interval {_number(mean.low)} to {_number(mean.high)}{disagrees}; p = {found.p_holm:.2g}{many}"
    if is_shown:
        word = "better" if mean.value > 0 else "worse"
        return (
            f"{method} is {word} than {baseline} by {_points(abs(mean.value))} at {level} with {found.num_pairs} seeds "
            f"({between}){rest}."
        )
    seen = f"{method} minus {baseline}: {_points(mean.value)}, {between}"
    least = fewest_seeds(mean.level, found.num_compared)
    if found.num_pairs < least:
        among = "" if found.num_compared == 1 else f" among {found.num_compared} comparisons"
        return (
            f"no difference can be shown at {level} with {found.num_pairs} seeds; the exact test needs at least "
            f"{least}{among} ({seen}){rest}."
        )
    return f"no difference shown at {level} with {found.num_pairs} seeds; {_needed(found, wanted)} ({seen}){rest}."


def _rest(found: PairedDifference, method: str, baseline: str, steps: tuple[float, float] | None) -> str:
    """What a reader has to know beside the numbers: pairs that are not in them, and unequal trainings."""
    told = ""
    if found.num_failed:
        one = found.num_failed == 1
        told += (
            f"; {found.num_failed} of {found.num_failed + found.num_pairs} pairs {'lacks' if one else 'lack'} a result "
            f"(failed, not finished or not run) and {'is' if one else 'are'} in none of these numbers"
        )
    if steps is not None:
        told += f"; {method} was measured after {steps[0]:.0f} steps, {baseline} after {steps[1]:.0f}"
    return told


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
    number = 100 * share
    text = f"{number:.1f}".removesuffix(".0") if abs(number) >= 0.1 else f"{number:.1g}"
    text = "0" if number == 0 else text
    return f"{text} point" if text in ("1", "-1") else f"{text} points"
