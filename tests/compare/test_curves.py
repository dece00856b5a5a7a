import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hybrid.compare.curves import Crossing, area_under_curve, cost_to_target, first_at_target

curves = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan]), min_size=1, max_size=8)


def reached(cost):
    return Crossing(cost=cost, reached=True)


def ended(cost):
    return Crossing(cost=cost, reached=False)


def test_area_by_hand():
    # 0 to 1 over 10, then flat for 10: (5 + 10) / 20
    assert area_under_curve([0, 10, 20], [0.0, 1.0, 1.0]).value == 0.75
    # up to 15 with an evaluation that failed at 10: the line from (0, 0) to (20, 1), half of 15 * 0.75 over 15
    found = area_under_curve([0, 10, 20], [0.0, math.nan, 1.0], until=15)
    assert_allclose(found.value, 0.375)
    assert (found.num_points, found.num_failed) == (1, 1)


@pytest.mark.parametrize(
    ("values", "until"), [([0.0, 1.0, math.nan], 20), ([0.0, 0.5, 1.0], 21), ([math.nan] * 3, None), ([0.5, 1, 1], 0)]
)
def test_a_curve_that_ends_early_has_no_area(values, until):
    assert math.isnan(area_under_curve([0, 10, 20], values, until=until).value)


@given(curves)
def test_area_lies_between_the_lowest_and_highest_value(values):
    found = area_under_curve(np.arange(len(values)), values)
    finite = [value for value in values if not math.isnan(value)]
    assert found.num_points == len(finite)
    assert found.num_failed == len(values) - len(finite)
    if len(finite) >= 2:
        assert min(finite) - 1e-12 <= found.value <= max(finite) + 1e-12
    else:
        assert math.isnan(found.value)


def test_costs_must_increase():
    with pytest.raises(ValueError, match="increase"):
        area_under_curve([0, 0], [1.0, 1.0])
    with pytest.raises(ValueError, match="increase"):
        first_at_target([0, 1], [1.0], 0.5)


def test_the_first_evaluation_at_the_target_counts():
    assert first_at_target([0, 8, 16, 24], [0.1, math.nan, 0.5, 0.4], 0.5) == reached(16)
    assert first_at_target([0, 8, 16, 24], [0.1, 0.2, 0.4, math.nan], 0.5) == ended(16)
    never = first_at_target([0, 8], [math.nan, math.nan], 0.5)
    assert math.isnan(never.cost)
    assert not never.reached


def test_the_median_cost_knows_of_runs_that_never_got_there():
    # survival after 10, 20, 30: 4/5, 3/5, 2/5; so half have reached it at 30
    found = cost_to_target([reached(10), reached(20), reached(30), ended(40), ended(40)])
    assert found.median.value == 30
    assert (found.num_reached, found.num_censored) == (3, 2)
    assert found.median.low <= 30
    assert found.median.high == math.inf
    # a run that ended at 15 leaves 3 at risk: 4/5, then 4/5 * 2/3, then 4/15
    assert cost_to_target([reached(10), ended(15), reached(20), reached(30), ended(40)]).median.value == 30


def test_a_half_that_rounding_hides_is_a_half():
    # survival 9/10, 6/10, 5/10 at 30: the product of the shares is a little above the half
    runs = [*[reached(10)], *[reached(20)] * 3, *[reached(30)] * 1, *[reached(40)] * 4, ended(50)]
    assert cost_to_target(runs).median.value == 30
    runs = [*[reached(10)] * 2, reached(20), *[reached(30)] * 2, *[ended(30)] * 2, *[reached(40)] * 2, ended(40)]
    assert cost_to_target(runs).median.value == 30


def test_a_run_that_ended_before_any_got_there_bounds_nothing():
    found = cost_to_target([ended(10), reached(20), reached(20), reached(30), reached(30), ended(50)])
    assert found.median.low == 20
    assert cost_to_target([ended(20), reached(40), reached(40), ended(50)]).median.low == 40


def test_runs_that_all_got_there_at_once_bound_the_median_if_they_are_enough():
    # none of 6 is still under way: at most 1 - 0.025^(1/6) = 46 % are, so that half have got there; of 5, 52 % might be
    six, five = (cost_to_target([reached(20)] * num).median for num in (6, 5))
    assert (six.low, six.value, six.high) == (20, 20, 20)
    assert (five.low, five.value, five.high) == (20, 20, math.inf)


def test_runs_that_mostly_fail_to_get_there_have_no_median():
    found = cost_to_target([reached(10), ended(40), ended(40)])
    assert found.median.value == math.inf
    none = cost_to_target([ended(40), ended(math.nan)])
    assert none.median.value == math.inf
    assert none.median.num_failed == 1
    assert math.isnan(cost_to_target([ended(math.nan)]).median.value)
    assert math.isnan(cost_to_target([]).median.value)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_without_censoring_it_is_the_least_cost_by_which_half_got_there(costs):
    found = cost_to_target([reached(float(cost)) for cost in costs])
    assert found.median.value == sorted(costs)[math.ceil(len(costs) / 2) - 1]
    if len(costs) > 1:
        assert found.median.low <= found.median.value <= found.median.high
