import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.objective.divergence import DivergenceKind, divergence, with_tail
from hybrid.objective.losses import (
    Likelihood,
    PolicyLoss,
    SampledDivergence,
    likelihood_token_loss,
    policy_token_loss,
    sampled_divergence,
)
from tests.batches import numbers
from tests.reference import losses

logits = st.lists(st.floats(-6, 6), min_size=2, max_size=6)
ALL = torch.ones(1, 1, dtype=torch.bool)


@given(
    a=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]),
    shift=st.floats(-3, 3) | st.sampled_from([0.0, 25.0, -25.0, math.log(1.2), math.log(0.8)]),
    dual=st.sampled_from([None, 1.5, 3.0]),
    high=st.sampled_from([0.2, 0.28]),
)
def test_surrogate_against_loops(a, shift, dual, high):
    loss = PolicyLoss(0.2, high, dual)
    got = policy_token_loss(loss, numbers([[a]]), numbers([[shift - 1]]), numbers([[-1.0]]), ALL)
    assert float(got) == pytest.approx(losses.surrogate(a, shift - 1, -1.0, high=high, dual=dual))


@pytest.mark.parametrize("a", [-1.5, 0.7])
def test_at_the_old_policy_the_gradient_is_minus_the_advantage(a):
    logprob_BT = numbers([[-1.0]]).requires_grad_()
    policy_token_loss(PolicyLoss(dual_clip=3.0), numbers([[a]]), logprob_BT, numbers([[-1.0]]), ALL).sum().backward()
    assert logprob_BT.grad is not None
    assert float(logprob_BT.grad) == pytest.approx(-a)


@pytest.mark.parametrize("a", [-1.5, 0.7])
@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_surrogate_gradient_against_differences(a, shift, level):
    loss = PolicyLoss(0.2, 0.28, 3.0, level)
    mask_BT = torch.tensor([[True, True, False]])

    def value(logprob_BT):
        return policy_token_loss(loss, numbers([[a, -a, 9.0]]), logprob_BT, numbers([[-1.0, -2.0, -0.1]]), mask_BT)

    start = numbers([[-1.0 + shift, -2.0 - shift / 2, -5.0]]).requires_grad_()
    assert torch.autograd.gradcheck(value, (start,))


def chance(row: list[float]) -> torch.Tensor:
    return numbers(row).log_softmax(-1)


@given(row=logits, other=logits, kind=st.sampled_from(["reverse_kl", "forward_kl", "jsd"]), beta=st.floats(0.05, 0.95))
def test_divergence_against_loops(row, other, kind: DivergenceKind, beta):
    width = min(len(row), len(other))
    p, q = chance(row[:width]).exp().tolist(), chance(other[:width]).exp().tolist()

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    want = {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[kind]
    got = divergence(numbers(p).log(), numbers(q).log(), kind, beta)
    assert float(got) == pytest.approx(want, abs=1e-9)
    assert float(got) >= -1e-12


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_divergence_gradient_against_differences(kind):
    teacher = chance([0.3, -1.0, 2.0, 0.5])

    def value(logit):
        return divergence(logit.log_softmax(-1), teacher, kind, 0.3)

    assert torch.autograd.gradcheck(value, (numbers([1.0, 0.5, -2.0, 0.1]).requires_grad_(),))


@given(row=logits, other=logits, size=st.integers(1, 5), kind=st.sampled_from(["reverse_kl", "forward_kl", "jsd"]))
def test_a_support_with_its_tail_is_a_coarser_divergence(row, other, size, kind: DivergenceKind):
    """Never negative and never more than the full one; the same where the support is all but one outcome."""
    width = min(len(row), len(other))
    p, q = chance(row[:width]), chance(other[:width])
    size = min(size, width - 1)
    full = float(divergence(p, q, kind))
    coarse = float(divergence(with_tail(p[:size]), with_tail(q[:size]), kind))
    assert -1e-12 <= coarse <= full + 1e-9
    if size == width - 1:
        assert coarse == pytest.approx(full, abs=1e-9)


def test_tail_gradient_against_differences():
    teacher = with_tail(chance([0.3, -1.0, 2.0, 0.5])[:2])

    def value(logit):
        return divergence(with_tail(logit.log_softmax(-1)[:2]), teacher, "reverse_kl")

    assert torch.autograd.gradcheck(value, (numbers([1.0, 0.5, -2.0, 0.1]).requires_grad_(),))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_sampled_divergence_gradient_against_differences(estimator):
    live_BT = torch.tensor([[True, True, False]])
    teacher_BT = numbers([[-0.5, -3.0, -float("inf")]])

    def value(logprob_BT):
        return sampled_divergence(SampledDivergence(estimator), logprob_BT, teacher_BT, live_BT)

    assert torch.autograd.gradcheck(value, (numbers([[-1.0, -1.0, -1.0]]).requires_grad_(),))


def test_likelihood():
    live_BU = torch.tensor([[True, False]])
    logprob_BU = numbers([[-2.0, -float("inf")]]).requires_grad_()
    assert likelihood_token_loss(Likelihood(), logprob_BU, live_BU).tolist() == [[2.0, 0.0]]
    as_policy = likelihood_token_loss(Likelihood(as_policy=True), logprob_BU, live_BU)
    assert as_policy.tolist() == [[-1.0, 0.0]]
    as_policy.sum().backward()
    assert logprob_BU.grad is not None
    assert logprob_BU.grad.tolist() == [[-1.0, 0.0]]
