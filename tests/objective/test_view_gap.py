import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.objective.view_gap import rank_split, sibling_softmax, view_advantage
from tests.batches import numbers
from tests.reference import va_opd

scores = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]) | st.floats(0, 5), min_size=1, max_size=12)


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2), st.booleans()), min_size=1, max_size=9),
    tau=st.sampled_from([0.05, 1.0, 10.0]),
)
def test_sibling_softmax_against_loops(rows, tau):
    group_B = torch.tensor([g for g, _, _ in rows])
    use_B = torch.tensor([u for _, _, u in rows])
    got = sibling_softmax(numbers([s for _, s, _ in rows]), group_B, use_B, tau=tau, eps=1e-6)
    want = []
    for group, score, use in rows:
        family = [s for g, s, u in rows if g == group and u]
        shares = va_opd.sibling_weights(family, tau=tau) if family else []
        want.append(shares[family.index(score)] if use else 0.0)
    torch.testing.assert_close(got, numbers(want))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_siblings_share_alike(count):
    got = sibling_softmax(
        numbers([0.3] * count),
        torch.zeros(count, dtype=torch.long),
        torch.ones(count, dtype=torch.bool),
        tau=1,
        eps=1e-6,
    )
    torch.testing.assert_close(got, numbers([1 / count] * count))


@given(
    values=scores, p_v=st.sampled_from([0.01, 0.2, 0.5, 1.0]), lam=st.sampled_from([0.0, 0.5, 1.0]), even=st.booleans()
)
def test_rank_split_against_loops(values, p_v, lam, even):
    score_BT = numbers([values])
    got = rank_split(
        score_BT, torch.ones_like(score_BT, dtype=torch.bool), p_v=p_v, lam=lam, uniform_without_score=even
    )
    torch.testing.assert_close(got, numbers([va_opd.token_weights(values, p_v=p_v, lam=lam, uniform=even)]))
    assert float(got.sum()) == pytest.approx(1)


@given(values=scores, pads=st.integers(1, 4), fill=st.sampled_from([9.0, -9.0, float("inf")]))
def test_padding_takes_no_share(values, pads, fill):
    score_BT = numbers([values + [fill] * pads])
    use_BT = torch.tensor([[True] * len(values) + [False] * pads])
    got = rank_split(score_BT, use_BT, p_v=0.3, lam=0.7)
    want = rank_split(score_BT[:, : len(values)], use_BT[:, : len(values)], p_v=0.3, lam=0.7)
    torch.testing.assert_close(got[:, : len(values)], want)
    assert (got[:, len(values) :] == 0).all()


def test_view_advantage_is_rectified_and_masked():
    use_BT = torch.tensor([[True, True, False]])
    got = view_advantage(numbers([[-1, -3, -float("inf")]]), numbers([[-2, -1, -float("inf")]]), use_BT)
    assert got.tolist() == [[1, 0, 0]]
