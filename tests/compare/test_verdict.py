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


@pytest.mark.parametrize(("num_failed", "lacks", "verb"), [(1, "lacks", "is"), (2, "lack", "are"), (6, "lack", "are")])
def test_pairs_without_a_result_are_named_in_every_sentence(num_failed, lacks, verb):
    runs = [math.nan] * num_failed + [0.60, 0.62, 0.58, 0.61, 0.63, 0.60, 0.6][num_failed:]
    sentence = say(runs, [0.5] * 7)
    why = "(failed, not finished or not run)"
    assert f"; {num_failed} of 7 pairs {lacks} a result {why} and {verb} in none of these numbers." in sentence


def test_nothing_finished_is_no_comparison():
    sentence = say([math.nan] * 8, [0.5] * 8)
    assert sentence == (
        "opdvr and grpo cannot be compared: no pair of runs finished; "
        "8 of 8 pairs lack a result (failed, not finished or not run) and are in none of these numbers."
    )


def test_the_claim_is_made_after_the_correction():
    clear = paired_difference([0.60, 0.62, 0.58, 0.61, 0.63, 0.60], [0.5] * 6)
    among_many = correct_for_many([clear, clear])[0]
    assert "is better" in verdict(clear, method="a", baseline="b")
    assert verdict(among_many, method="a", baseline="b").startswith("no difference can be shown at 95 % with 6 seeds")


def test_a_corrected_p_says_so_and_an_interval_that_disagrees_with_the_test_too():
    baseline = np.full(9, 0.4)
    seen = paired_difference(baseline + np.array([5, 2, 3, -1, 4, 6, 1, 2, -1]) / 100, baseline)
    alone = verdict(seen, method="a", baseline="b")
    assert alone.startswith(
        "a is better than b by 2.3 points at 95 % with 9 seeds (95 % interval +0.8 to +3.8; p = 0.0"
    )
    among = verdict(correct_for_many([seen] * 12)[0], method="a", baseline="b")
    assert "a minus b: 2.3 points, 95 % interval +0.8 to +3.8, which leaves out 0; p = " in among
    assert among.endswith(" after correction for 12 comparisons).")


def test_a_small_difference_is_not_told_as_none():
    tiny = say([0.5003, 0.5003, 0.5003, 0.5003, 0.5003, 0.5004], [0.5] * 6)
    assert tiny.startswith("opdvr is better than grpo by 0.03 points at 95 % with 6 seeds")
    assert "opdvr minus grpo: 0 points, 95 % interval +0.0 to +0.0; p = 1" in say([0.5] * 6, [0.5] * 6)
    assert say([0.4997], [0.5]) == "nothing shown with one seed (opdvr minus grpo: -0.03 points)."
    assert say([0.51], [0.5]) == "nothing shown with one seed (opdvr minus grpo: 1 point)."


def test_trainings_of_unequal_length_are_told():
    found = paired_difference([0.6, 0.7], [0.5, 0.5])
    sentence = verdict(found, method="opd", baseline="grpo", steps=(60, 40))
    assert sentence.endswith("; opd was measured after 60 steps, grpo after 40.")
