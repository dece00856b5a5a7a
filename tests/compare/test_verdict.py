import math

import numpy as np
import pytest

from hybrid.compare.statistics import correct_for_many, paired_difference
from hybrid.compare.verdict import verdict


def say(method, baseline, **changes):
    return verdict(paired_difference(method, baseline), method="opdvr", baseline="grpo", **changes)


def test_a_shown_difference_is_told_with_its_interval():
    better = say([0.60, 0.62, 0.58, 0.61, 0.63, 0.60], [0.5] * 6)
    assert better.startswith("opdvr is better than grpo by 10.7 points at 95 % with 6 seeds (95 % interval +")
    assert better.endswith("; p = 0.031).")
    assert say([0.5] * 6, [0.60, 0.62, 0.58, 0.61, 0.63, 0.60]).startswith("opdvr is worse than grpo by 10.7 points")
    assert "is worse" in say([60, 62, 58, 61, 63, 60], [50] * 6, higher_is_better=False)


def test_what_is_not_shown_says_what_it_would_take():
    pattern = np.array([1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    difference = 0.05 * pattern / np.std(pattern, ddof=1)
    # sd of the differences 0.05: 3 points are an effect of 0.6, 24 seeds by the tables; 5 points are 1.0, 10 seeds
    sentence = say(0.5 + difference, np.full(6, 0.5))
    assert sentence.startswith("no difference shown at 95 % with 6 seeds; 24 would be needed for 3 points (")
    assert "opdvr minus grpo: " in sentence
    assert "10 would be needed for 5 points" in say(0.5 + difference, np.full(6, 0.5), wanted=0.05)


def test_seeds_that_would_have_shown_it_are_not_asked_for_again():
    assert "one of 3 points would probably have been seen" in say(
        [0.501, 0.5, 0.499, 0.5, 0.501, 0.499, 0.5, 0.5], [0.5] * 8
    )


def test_too_few_seeds_can_show_nothing():
    sentence = say([0.9, 0.8, 0.9, 0.9, 0.8], [0.1] * 5)
    assert sentence.startswith("no difference can be shown at 95 % with 5 seeds; the exact test needs at least 6 (")
    assert say([0.9], [0.1]) == "nothing shown with one seed (opdvr minus grpo: 80 points)."


def test_seeds_that_are_enough_for_one_comparison_may_be_too_few_for_many():
    clear = paired_difference([0.9, 0.8, 0.9, 0.9, 0.8, 0.9, 0.9, 0.8], [0.1] * 8)
    sentence = verdict(correct_for_many([clear] * 11)[0], method="opdvr", baseline="grpo")
    assert sentence.startswith(
        "no difference can be shown at 95 % with 8 seeds; the exact test needs at least 9 among 11 comparisons ("
    )
    assert verdict(correct_for_many([clear] * 6)[0], method="opdvr", baseline="grpo").startswith("opdvr is better than")


@pytest.mark.parametrize(("num_failed", "verb"), [(1, "is"), (2, "are"), (6, "are")])
def test_failed_runs_are_named_in_every_sentence(num_failed, verb):
    runs = [math.nan] * num_failed + [0.60, 0.62, 0.58, 0.61, 0.63, 0.60, 0.6][num_failed:]
    sentence = say(runs, [0.5] * 7)
    assert f"{num_failed} of 7 pairs failed and {verb} in none of these numbers" in sentence


def test_nothing_finished_is_no_comparison():
    sentence = say([math.nan] * 8, [0.5] * 8)
    assert sentence == (
        "opdvr and grpo cannot be compared: no pair of runs finished; "
        "8 of 8 pairs failed and are in none of these numbers."
    )


def test_the_claim_is_made_after_the_correction():
    clear = paired_difference([0.60, 0.62, 0.58, 0.61, 0.63, 0.60], [0.5] * 6)
    among_many = correct_for_many([clear, clear])[0]
    assert "is better" in verdict(clear, method="a", baseline="b")
    assert verdict(among_many, method="a", baseline="b").startswith("no difference can be shown at 95 % with 6 seeds")
