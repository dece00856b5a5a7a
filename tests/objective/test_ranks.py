import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.objective.gates import probabilistic_or, token_score
from hybrid.objective.ranks import masked_median, top_share, top_share_per_response, unit_range
from tests.batches import numbers
from tests.reference import rstg

tied = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=10)
numbers_and_mask = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=9)


@given(rows=tied, percent=st.sampled_from([1.0, 10.0, 20.0, 33.0, 50.0, 99.0, 100.0]))
def test_exactly_the_share_is_kept_and_ties_go_by_order(rows, percent):
    score_BT, use_BT = numbers([[s for s, _ in rows]]), torch.tensor([[u for _, u in rows]])
    used = [t for t, (_, use) in enumerate(rows) if use]
    best = rstg.top([rows[t][0] for t in used], percent)
    want = {used[n] for n in best}
    for pick in (top_share, top_share_per_response):
        keep_BT = pick(score_BT, use_BT, percent)
        assert set(keep_BT[0].nonzero()[:, 0].tolist()) == want
        assert len(want) == math.ceil(percent * len(used) / 100)


def test_scope():
    score_BT, use_BT = numbers([[5, 4, 3, 2], [1, 1, 1, 9]]), torch.ones(2, 4, dtype=torch.bool)
    assert top_share(score_BT, use_BT, 50).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    assert top_share_per_response(score_BT, use_BT, 50).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]


@given(numbers_and_mask)
def test_unit_range_against_loops(rows):
    value_BT, use_BT = numbers([[v for v, _ in rows]]), torch.tensor([[u for _, u in rows]])
    used = [v for v, use in rows if use]
    want = iter(rstg.unit(used) if used else [])
    torch.testing.assert_close(unit_range(value_BT, use_BT), numbers([[next(want) if use else 0.0 for _, use in rows]]))


def test_values_that_are_equal_up_to_rounding_are_constant():
    """A gap of 0.3 comes out as 0.30000000000000004, 0.3 or, far from the origin, 0.3000000000000007."""
    value_BT = numbers([[0.1 + 0.2, 0.3, -9.7 + 10.0]])
    assert len(set(value_BT[0].tolist())) > 1
    assert (unit_range(value_BT, torch.ones_like(value_BT, dtype=torch.bool)) == 0).all()


@given(numbers_and_mask)
def test_masked_median_against_the_library(rows):
    value_BT, use_BT = numbers([[v for v, _ in rows]]), torch.tensor([[u for _, u in rows]])
    used = [v for v, use in rows if use]
    assert float(masked_median(value_BT, use_BT)) == pytest.approx(statistics.median(used) if used else 0.0)


def test_median_of_a_batch_without_a_token():
    assert masked_median(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


@given(st.floats(0, 1), st.floats(0, 1))
def test_probabilistic_or(a, b):
    both = float(probabilistic_or(numbers([a]), numbers([b])))
    assert max(a, b) - 1e-12 <= both <= 1 + 1e-12


@given(
    rows=st.lists(st.tuples(st.floats(0, 3), st.floats(-4, 4)), min_size=1, max_size=12),
    percentile=st.sampled_from([None, 50.0, 98.0, 100.0]),
)
def test_token_score_against_loops(rows, percentile):
    entropy, gap = [h for h, _ in rows], [g for _, g in rows]
    got = token_score(
        numbers([entropy]), numbers([gap]), torch.ones(1, len(rows), dtype=torch.bool), entropy_percentile=percentile
    )
    torch.testing.assert_close(got, numbers([rstg.scores(entropy, gap, percentile)]), atol=1e-7, rtol=1e-6)
    assert ((got >= 0) & (got <= 1 + 1e-12)).all()


def test_the_percentile_cuts_an_outlier():
    entropy = [0.0, 1.0, 2.0, 100.0]
    use_BT = torch.ones(1, 4, dtype=torch.bool)
    got = token_score(numbers([entropy]), torch.zeros(1, 4), use_BT, entropy_percentile=50.0)
    torch.testing.assert_close(got, numbers([[0, 1 / 1.5, 1, 1]]))  # the median is 1.5
