import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.objective.contrast import evidence_factor
from hybrid.objective.weights import agreement_share, mass_preserving
from tests.batches import numbers
from tests.reference.sipo import multiplicative_token

FULL = torch.ones(1, 3, dtype=torch.bool)


def test_mass_preserving_by_hand():
    # a = (1, 2, 1) has the mass 4; s a = (1, 0, 1) has 2; so every share doubles
    got = mass_preserving(numbers([[1, 0, 1]]), numbers([[1, 2, 1]]), FULL)
    torch.testing.assert_close(got, numbers([[2, 0, 2]]))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5), st.booleans()), min_size=1, max_size=12))
def test_the_summed_size_is_kept(rows):
    share_BT, size_BT = numbers([[s for s, _, _ in rows]]), numbers([[a for _, a, _ in rows]])
    use_BT = torch.tensor([[u for _, _, u in rows]])
    weight_BT = mass_preserving(share_BT, size_BT, use_BT)
    before, reachable = float((size_BT * use_BT).sum()), float((share_BT * size_BT * use_BT).sum())
    assert float((weight_BT * size_BT).sum()) == pytest.approx(
        before if reachable > 1e-290 else 0.0, rel=1e-9, abs=1e-9
    )
    assert (weight_BT[~use_BT] == 0).all()


def test_an_error_names_the_place():
    with pytest.raises(
        ValueError, match=r"share_BT must be finite and >= 0; got -0.5 at index \(0, 1\) \(1 bad of 3\)"
    ):
        mass_preserving(numbers([[1, -0.5, 1]]), torch.ones(1, 3), FULL)


def test_wrong_shapes_are_refused():
    with pytest.raises(Exception, match="size_BT"):
        mass_preserving(torch.ones(1, 4), torch.ones(1, 3), FULL)


def test_agreement_share_goes_from_plain_to_the_hard_gate():
    signal_BT = numbers([[2.0, -1.0, 0.0]])
    for outcome, hard in ((1.0, [1, 0, 0.5]), (-1.0, [0, 1, 0.5]), (0.0, [0.5] * 3)):
        soft = agreement_share(signal_BT, numbers([outcome]), FULL, beta=0.0, eps=1e-6)
        torch.testing.assert_close(soft, numbers([[0.5] * 3]))
        sharp = agreement_share(signal_BT, numbers([outcome]), FULL, beta=1e6, eps=1e-6)
        torch.testing.assert_close(sharp, numbers([hard]))


@given(e=st.floats(-50, 50), a=st.sampled_from([-0.75, 0.0, 0.25]), lam=st.floats(0, 1), eps=st.floats(0.01, 0.99))
def test_evidence_factor_against_loops(e, a, lam, eps):
    factor = float(evidence_factor(numbers([[e]]), numbers([a]).sign(), lam=lam, eps=eps))
    assert a * factor == pytest.approx(multiplicative_token(a, e, lam=lam, eps=eps))
    assert 1 - lam * eps - 1e-12 <= factor <= 1 + lam * eps + 1e-12
