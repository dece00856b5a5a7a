"""What `hybrid compare` prints, beside the statistics themselves."""

import math

from hybrid.compare.load import RunData, latest_of_each_cell
from hybrid.compare.statistics import Estimate
from hybrid.comparison import interval, left_out


def run(start_ms, method="opdvr", **params):
    return RunData(
        method=method, seed=0, task="", status="FINISHED", params=params, curves={}, tags={}, artifacts=None,
        run_id=str(start_ms), start_ms=start_ms,
    )  # fmt: skip


def estimate(value, low, high):
    kind = "none" if math.isnan(low) else "bca"
    return Estimate(value=value, low=low, high=high, level=0.95, num=1, num_failed=0, interval=kind)


def test_a_share_without_an_interval_is_the_share_alone():
    assert interval(estimate(0.375, math.nan, math.nan)) == "37.5"
    assert interval(estimate(math.nan, math.nan, math.nan)) == "-"
    assert interval(estimate(0.375, 0.25, 0.5)) == "37.5 [dim](25.0 to 50.0)[/dim]"


def test_a_training_that_a_later_one_replaces_is_told_with_what_it_had():
    runs = [run(1, lr="1e-3", steps="60"), run(2, lr="1e-4", steps="60"), run(3, method="grpo", lr="1e-3")]
    assert left_out(*latest_of_each_cell(runs)) == (
        "left out: 1 of 3 trainings, each with a later one of the same method, seed and task, some with another lr; "
        "a sweep keeps such apart (vary)"
    )
    again = [run(1, lr="1e-3"), run(2, lr="1e-3")]
    assert "seed and task; a sweep" in left_out(*latest_of_each_cell(again))
