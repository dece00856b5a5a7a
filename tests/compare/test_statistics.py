import math
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hybrid.compare.statistics import (
    avg_at_k,
    cliffs_delta,
    cohens_dz,
    correct_for_many,
    fewest_seeds,
    hedges_g,
    holm,
    mean_with_interval,
    paired_difference,
    pass_at_k,
    seeds_needed,
    sign_flip_p_value,
)

values = st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.1, 0.25, 0.3, 1.0]), min_size=1, max_size=7)
with_failures = st.lists(st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0, math.nan]), min_size=1, max_size=7)


def test_pass_at_k_by_hand():
    # n=4, c=1: one draw hits with 1/4; of the 6 pairs 3 hold the right one; four draws always do
    assert_allclose(pass_at_k([4, 4, 4], [1, 1, 1], 1), [0.25] * 3)
    assert_allclose(pass_at_k([4], [1], 2), [0.5])
    assert_allclose(pass_at_k([4, 4, 4], [0, 1, 4], 4), [0.0, 1.0, 1.0])


@given(st.integers(1, 7), st.data())
def test_pass_at_k_against_all_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    answers = [1] * c + [0] * (n - c)
    hits = [max(subset) for subset in combinations(answers, k)]
    assert_allclose(pass_at_k([n], [c], k), [np.mean(hits)], atol=1e-15)


def test_pass_at_k_keeps_its_digits():
    # 1 - (1 - 1e-9)^... : with n = 1e9 and c = 1 the chance is k / n exactly
    assert_allclose(pass_at_k([1e9], [1], 3), [3e-9], rtol=1e-12)
    assert_allclose(pass_at_k([100_000], [3], 1), [3e-5], rtol=1e-12)


def test_a_prompt_that_was_not_scored_stays_nan():
    assert_allclose(pass_at_k([4, 4], [math.nan, 2], 1), [math.nan, 0.5])
    assert_allclose(avg_at_k([4, 4], [math.nan, 2], 4), [math.nan, 0.5])


@pytest.mark.parametrize("measure", [pass_at_k, avg_at_k])
@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(measure, n, c, k):
    with pytest.raises(ValueError, match="must"):
        measure([n], [c], k)


@given(st.integers(1, 30), st.data())
def test_avg_at_k_is_pass_at_one_and_pass_grows_with_k(n, data):
    c = data.draw(st.integers(0, n))
    assert_allclose(avg_at_k([n], [c], n), pass_at_k([n], [c], 1), atol=1e-15)
    curve = [float(pass_at_k([n], [c], k)[0]) for k in range(1, n + 1)]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(curve))


@settings(deadline=None)
@given(with_failures)
def test_a_mean_counts_failures_and_lies_in_its_interval(runs):
    found = mean_with_interval(runs)
    finished = [run for run in runs if not math.isnan(run)]
    assert found.num == len(finished)
    assert found.num_failed == len(runs) - len(finished)
    assert_allclose(found.value, np.mean(finished) if finished else math.nan)
    if len(finished) < 2:
        assert found.interval == "none"
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    else:
        assert min(finished) - 1e-12 <= found.low <= found.value + 1e-12
        assert found.value - 1e-12 <= found.high <= max(finished) + 1e-12


def test_equal_runs_have_an_interval_of_no_width():
    found = mean_with_interval([0.25, 0.25, 0.25])
    assert (found.low, found.value, found.high, found.interval) == (0.25, 0.25, 0.25, "equal")


def test_the_interval_covers_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [
        found.low <= 0.5 <= found.high
        for found in (mean_with_interval(rng.normal(0.5, 0.1, 20), seed=trial) for trial in range(200))
    ]
    assert 0.88 <= np.mean(covered) <= 0.99


def test_a_mean_is_the_same_every_time():
    assert mean_with_interval([0.1, 0.5, 0.7]) == mean_with_interval([0.1, 0.5, 0.7])


def test_sign_flips_by_hand():
    # differences 1, 2, 3: only all plus and all minus reach |sum| = 6, 2 of 8 patterns
    assert sign_flip_p_value(np.array([1.0, 2.0, 3.0])) == 0.25
    # 1, 1, -1: sum 1 or more in absolute value in all 8 patterns
    assert sign_flip_p_value(np.array([1.0, 1.0, -1.0])) == 1.0
    assert sign_flip_p_value(np.array([0.5] * 6)) == 2 / 64
    assert sign_flip_p_value(np.zeros(4)) == 1.0
    assert math.isnan(sign_flip_p_value(np.array([0.5])))


@settings(deadline=None)
@given(values)
def test_sign_flips_against_all_patterns(differences):
    if len(differences) < 2:
        return
    seen = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product([1, -1], repeat=len(differences))
    ]
    assert_allclose(sign_flip_p_value(np.array(differences)), np.mean([total >= seen - 1e-9 for total in sums]))


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.sampled_from([7, 100, 192, 300]), st.data())
def test_ties_of_small_differences_of_accuracies_count_whatever_their_rounding(counts, num_answers, data):
    right = [data.draw(st.integers(3, num_answers)) for _ in counts]
    differences = np.array([(r + c) / num_answers - r / num_answers for r, c in zip(right, counts, strict=True)])
    patterns = list(product([1, -1], repeat=len(counts)))
    reaching = [abs(sum(s * c for s, c in zip(signs, counts, strict=True))) >= abs(sum(counts)) for signs in patterns]
    assert sign_flip_p_value(differences) == np.mean(reaching)


def test_many_pairs_are_drawn_and_agree_with_the_t_test():
    from scipy import stats

    difference = np.random.default_rng(1).normal(0.1, 0.2, 40)
    t = difference.mean() / (difference.std(ddof=1) / math.sqrt(40))
    assert_allclose(sign_flip_p_value(difference), 2 * stats.t.sf(abs(t), 39), rtol=0.2)


def test_holm_by_hand():
    # sorted .01 .02 .04 times 3, 2, 1 gives .03 .04 .04; a comparison that failed does not count
    assert_allclose(holm([0.04, 0.01, math.nan, 0.02]), [0.04, 0.03, math.nan, 0.04])
    assert_allclose(holm([0.6, 0.5]), [1.0, 1.0])
    assert holm([]).shape == (0,)


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8))
def test_holm_lies_between_nothing_and_bonferroni_and_keeps_the_order(p_values):
    corrected = holm(p_values)
    assert (corrected >= np.array(p_values) - 1e-15).all()
    assert (corrected <= np.minimum(1, len(p_values) * np.array(p_values)) + 1e-12).all()
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(corrected[order]) >= 0).all()


def test_effect_sizes_by_hand():
    # 1, 2, 3: mean 2, sd 1. Hedges: m = 2, Gamma(1) / (1 * Gamma(1/2)) = 1 / sqrt(pi)
    assert cohens_dz(np.array([1.0, 2.0, 3.0])) == 2.0
    assert_allclose(hedges_g(2.0, 3), 2 / math.sqrt(math.pi))
    assert cohens_dz(np.array([0.3, 0.3])) == math.inf
    assert cohens_dz(np.array([0.0, 0.0])) == 0.0
    assert math.isnan(cohens_dz(np.array([1.0])))
    assert math.isnan(hedges_g(1.0, 2))
    # 2 against (1, 2, 3): one win, one tie, one loss; 4 wins all
    assert_allclose(cliffs_delta(np.array([2.0, 4.0]), np.array([1.0, 2.0, 3.0])), 0.5)
    assert math.isnan(cliffs_delta(np.array([]), np.array([1.0])))


def test_differences_that_are_equal_but_for_rounding_are_equal():
    baseline = np.array([0.6, 0.7, 0.5, 0.3, 0.2, 0.15])
    found = paired_difference(baseline + 0.1, baseline)
    assert (found.sd, found.effect_dz, found.mean.interval) == (0.0, math.inf, "equal")
    none = paired_difference([0.1 + 0.2] * 6, [0.3] * 6)
    assert (none.mean.value, none.p_value, none.effect_dz) == (0.0, 1.0, 0.0)


def test_a_paired_difference_by_hand():
    found = paired_difference([0.5, 0.7, math.nan, 0.9], [0.4, 0.5, 0.6, 0.6])
    assert_allclose(found.mean.value, 0.2)
    assert_allclose(found.sd, 0.1)
    assert_allclose(found.effect_dz, 2.0)
    assert found.p_value == found.p_holm == 0.25
    assert (found.num_pairs, found.num_failed) == (3, 1)
    assert (found.mean.num, found.mean.num_failed) == (3, 1)


@pytest.mark.parametrize("runs", [[math.nan] * 3, [0.5, math.nan, math.nan], []])
def test_degenerate_pairs_say_nothing_and_count_all(runs):
    found = paired_difference(runs, [0.4] * len(runs))
    assert math.isnan(found.p_value)
    assert math.isnan(found.sd)
    assert found.num_pairs + found.num_failed == len(runs)
    assert found.mean.interval == "none"


def test_runs_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="seed by seed; got 2 and 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, math.nan]), st.sampled_from([0.0, 0.25, 1.0])), max_size=6))
def test_swapping_the_two_mirrors_the_difference(pairs):
    method, baseline = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    one, other = paired_difference(method, baseline), paired_difference(baseline, method)
    assert_allclose(one.mean.value, -other.mean.value)
    assert_allclose(one.p_value, other.p_value)
    assert_allclose(one.cliffs_delta, -other.cliffs_delta)
    assert one.num_failed == other.num_failed == sum(math.isnan(x) for x in method)


def test_many_comparisons_are_corrected_together():
    clear = paired_difference([0.9] * 7, [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1])
    unclear = paired_difference([0.5, 0.1], [0.1, 0.5])
    failed = paired_difference([math.nan], [0.1])
    corrected = correct_for_many([clear, unclear, failed])
    assert corrected[0].p_value == 2 / 128
    assert corrected[0].p_holm == 4 / 128
    assert {one.num_compared for one in corrected} == {2}
    assert corrected[1].p_holm == 1.0
    assert math.isnan(corrected[2].p_holm)


# from G*Power 3.1, t test of matched pairs, two-sided, alpha 0.05, power 0.8
@pytest.mark.parametrize(("effect", "num"), [(0.3, 90), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_agrees_with_published_tables(effect, num):
    assert seeds_needed(0.1, 0.1 * effect) == num
    assert seeds_needed(0.1, -0.1 * effect) == num


def test_seeds_needed_at_its_limits():
    assert fewest_seeds(0.95) == 6  # 2^(1-6) = 0.031
    assert fewest_seeds(0.75) == 3  # 2^(1-3) = 0.25 exactly
    assert fewest_seeds(0.95, 11) == 9  # 11 * 2^(1-9) = 0.043
    assert fewest_seeds(0.95, 2) == 7  # 2 * 2^(1-7) = 0.031
    assert seeds_needed(0.0, 0.03) == 6
    assert seeds_needed(0.0, 0.03, num_compared=11) == 9
    # G*Power 3.1 at effect 0.5, alpha 0.01 and power 0.8
    assert seeds_needed(0.1, 0.05, num_compared=5) == 51
    assert seeds_needed(0.01, 1.0) == 6
    assert math.isnan(seeds_needed(math.nan, 0.03))
    assert seeds_needed(100.0, 0.001) == math.inf
    with pytest.raises(ValueError, match="not 0"):
        seeds_needed(0.1, 0.0)


def test_the_number_of_seeds_gives_the_power():
    rng = np.random.default_rng(0)
    num = int(seeds_needed(1.0, 1.2))
    shown = [sign_flip_p_value(rng.normal(1.2, 1.0, num)) <= 0.05 for _ in range(300)]
    assert 0.70 <= np.mean(shown) <= 0.92
