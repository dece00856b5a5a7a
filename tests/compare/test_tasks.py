import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hybrid.compare.tasks import interquartile_mean, probability_of_improvement

runs = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan]), min_size=1, max_size=4)


def test_the_interquartile_mean_by_hand():
    # 8 runs over both tasks, 2 cut at each end: 0.2 0.3 0.4 0.5 stay
    found = interquartile_mean({"sums": np.array([0.0, 0.1, 0.2, 0.3]), "words": np.array([0.4, 0.5, 0.6, 9.0])})
    assert_allclose(found.value, 0.35)
    assert 0.0 <= found.low <= found.value <= found.high <= 9.0
    assert found.num == 8


def test_resampling_stays_within_the_tasks():
    # every task has one value, so no resample can differ, however far the tasks lie apart
    found = interquartile_mean({"a": np.array([0.1, 0.1]), "b": np.array([0.9, 0.9])})
    assert_allclose([found.low, found.value, found.high], 0.5)


def test_probability_of_improvement_by_hand():
    # a: 2 beats 1, ties with 2, loses to 3 -> 1.5 / 3; b: always wins -> 1
    method = {"a": np.array([2.0]), "b": np.array([5.0, 6.0])}
    baseline = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([4.0])}
    found = probability_of_improvement(method, baseline)
    assert_allclose(found.value, 0.75)
    assert found.low <= found.value <= found.high


@settings(deadline=None)
@given(st.lists(st.tuples(runs, runs), min_size=1, max_size=3))
def test_against_loops_and_failures_are_counted(tasks):
    method = {str(i): np.array(pair[0]) for i, pair in enumerate(tasks)}
    baseline = {str(i): np.array(pair[1]) for i, pair in enumerate(tasks)}
    found = probability_of_improvement(method, baseline, num_resamples=50)
    middle = interquartile_mean(method, num_resamples=50)
    assert found.num_failed == sum(math.isnan(x) for pair in tasks for side in pair for x in side)
    assert middle.num_failed == sum(math.isnan(x) for pair in tasks for x in pair[0])
    slow = []
    for ours, theirs in tasks:
        duels = [
            1.0 if x > y else 0.5 if x == y else 0.0
            for x in ours
            for y in theirs
            if not math.isnan(x) and not math.isnan(y)
        ]
        slow.append(np.mean(duels) if duels else math.nan)
    assert_allclose(found.value, np.mean(slow))
    finished = sorted(x for pair in tasks for x in pair[0] if not math.isnan(x))
    cut = len(finished) // 4
    whole = all(any(not math.isnan(x) for x in pair[0]) for pair in tasks)
    assert_allclose(middle.value, np.mean(finished[cut : len(finished) - cut]) if whole else math.nan)


def test_one_run_a_task_has_no_interval():
    assert interquartile_mean({"a": np.array([0.5]), "b": np.array([0.7])}).interval == "none"
    assert interquartile_mean({}).num == 0


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="the tasks differ"):
        probability_of_improvement({"a": np.array([1.0])}, {"b": np.array([1.0])})
