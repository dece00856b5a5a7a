"""Public bug reports of the field (pitfalls.md, same numbers), each with a small input and the right value."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from hybrid.methods.grpo import Grpo
from hybrid.methods.mix import Mix, Part
from hybrid.methods.opd import Opd
from hybrid.objective.divergence import divergence, with_tail
from hybrid.objective.losses import PolicyLoss, SampledDivergence, StudentPass, sampled_divergence
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import chain
from hybrid.types import RolloutBatch
from tests.batches import NAN, Toy, advantages, assignment_rows, numbers, plain_batch, run, view

P, Q = numbers([0.7, 0.2, 0.1]), numbers([0.2, 0.5, 0.3])  # teacher and student of entries 4 and 42


def opd_batch(student: list[list[float]], teacher: list[list[float]], **fields) -> RolloutBatch:
    return plain_batch(
        [len(row) for row in student], student_logprob_BT=numbers(student), views={"teacher": view(teacher)}, **fields
    )


def test_1_scores_stand_at_their_own_tokens():
    assert advantages(Opd().build(), opd_batch([[-1, -1]], [[-0.5, -2]])).tolist() == [[0.5, -1.0]]
    assert advantages(Opd().build(), opd_batch([[-1]], [[-0.5]])).tolist() == [[0.5]]


def expected_gradient(estimator: str) -> float:
    """Expected gradient to the logit of token 0 over q = (.5, .5) with the teacher at (.9, .1)."""
    logit = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    teacher, total = numbers([0.9, 0.1]).log(), 0.0
    for token in (0, 1):
        logprob = logit.log_softmax(-1)[token]
        if estimator == "reward":  # k1 as a detached advantage
            gap = (teacher[token] - logprob).detach()
            loss = -gap * (logprob - logprob.detach()).exp()
        else:
            assert estimator in ("k2", "k3")
            loss = sampled_divergence(
                SampledDivergence("k2" if estimator == "k2" else "k3"),
                logprob[None, None],
                teacher[token][None, None],
                torch.ones(1, 1, dtype=torch.bool),
            ).sum()
        total += 0.5 * float(torch.autograd.grad(loss, logit)[0][0])
    return total


def test_3_k1_is_a_reward_and_no_loss():
    # the true reverse KL has -0.5493; k1 as a loss 0.0; k3 descends the forward KL
    assert expected_gradient("reward") == pytest.approx(-0.5493, abs=1e-4)
    assert expected_gradient("k2") == pytest.approx(-0.5493, abs=1e-4)
    assert expected_gradient("k3") == pytest.approx(-0.4, abs=1e-9)
    with pytest.raises(ValidationError, match="k1 as a differentiable loss has an expected gradient of zero"):
        Opd(estimator="k1", use="loss")


def test_4_a_whole_distribution_is_no_advantage():
    logit = Q.log().clone().requires_grad_()
    value = divergence(logit.log_softmax(-1), P.log(), "reverse_kl")
    assert value.item() == pytest.approx(0.5372, abs=1e-4)
    gradient = torch.autograd.grad(value, logit)[0]
    torch.testing.assert_close(gradient, numbers([-0.3580, 0.1896, 0.1684]), atol=1e-4, rtol=0)
    with pytest.raises(ValidationError, match="reverse_kl does not depend on the sampled token"):
        Opd(estimator="reverse_kl", use="reward")


def test_8_a_truncated_support_needs_its_tail():
    p, q = numbers([0.5, 0.3, 0.2]).log(), numbers([0.6, 0.35, 0.05]).log()
    plain = float((p[:2].exp() * (p[:2] - q[:2])).sum())
    assert plain == pytest.approx(-0.1374, abs=1e-4)  # a KL cannot be negative
    full = float(divergence(q, p, "forward_kl"))
    assert float(divergence(with_tail(q[:2]), with_tail(p[:2]), "forward_kl")) == pytest.approx(full)
    assert full == pytest.approx(0.1399, abs=1e-4)
    assert float(divergence(with_tail(q[:1]), with_tail(p[:1]), "forward_kl")) == pytest.approx(0.0204, abs=1e-4)
    sure = with_tail(numbers([1.0]).log())
    assert float(divergence(with_tail(q[:1]), sure, "forward_kl")) == pytest.approx(
        -float(q[0])
    )  # no nan from the tail


def test_10_nothing_to_train_is_zero_and_not_nan():
    batch = opd_batch([[-1, -1], [-1, -1]], [[-3, -3], [-3, -3]])
    empty = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    toy = Toy.same(empty)
    loss = run(Opd().build(), empty, toy).total
    loss.backward()
    assert loss.item() == 0
    assert toy.theta_BT.grad is not None
    assert (toy.theta_BT.grad == 0).all()
    half = replace(batch, mask_BT=torch.tensor([[False, False], [True, True]]))
    assert run(Opd().build(), half, Toy.same(half)).total.item() == pytest.approx(2.0)


def test_11_numerator_and_denominator_use_one_mask():
    # A: 4 finished tokens; B: 6 tokens, lost; loss 1 each -> 1.0 (4 / 10 would be the bug)
    batch = opd_batch([[-1.0] * 6] * 2, [[-2.0] * 6] * 2)
    mask_BT = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    lost = replace(batch.view("teacher"), valid_BT=torch.tensor([[True] * 6, [False] * 6]))
    batch = replace(batch, mask_BT=mask_BT, views={"teacher": lost})
    assert run(Opd().build(), batch, Toy.same(batch)).total.item() == pytest.approx(1.0)


def split_loss(method: Objective, batch: RolloutBatch, parts: list[list[int]]) -> float:
    assignment, _ = method.assign(batch, {})
    total, toy = 0.0, Toy.same(batch)
    for part in parts:
        index = torch.tensor(part)
        rows = batch.rows(index)
        answers = toy.rows(index).answers(rows, method)
        total += method.loss(assignment_rows(assignment, index), rows, answers).total.item()
    return total


@pytest.mark.parametrize("parts", [[[0], [1]], [[1], [0]], [[0, 1]], [[0], [1], []]])
def test_12_accumulation_is_no_mean_of_means(parts):
    # token losses [3, 3] and [1 x 8] -> (6 + 8) / 10 = 1.4, not 2.0
    batch = plain_batch(
        [2, 8],
        student_logprob_BT=numbers([[-1.0] * 8] * 2),
        views={"teacher": view([[-4.0] * 8, [-2.0] * 8])},
    )
    parts = [part for part in parts if part]
    assert split_loss(Opd().build(), batch, parts) == pytest.approx(1.4)


def two_signals(rl_rows: int = 1) -> tuple[Objective, RolloutBatch]:
    """RL on 6 tokens with loss 1, distillation on 2 tokens with loss 3."""
    batch = plain_batch(
        [6] * rl_rows,
        reward_B=numbers([0.0] * rl_rows),
        student_logprob_BT=numbers([[-1.0] * 6] * rl_rows),
        views={
            "teacher": view([[-4.0] * 6] * rl_rows, [[True] * 2 + [False] * 4] * rl_rows),
            "wrong": view([[-2.0] * 6] * rl_rows),
        },
    )
    rl = objective(name="rl", credit=chain(from_teacher_gap(view="wrong")), loss=PolicyLoss(), reduction=token_mean())
    return mix((1.0, rl), (1.0, Opd().build())), batch


def test_13_every_signal_has_its_own_denominator():
    method, batch = two_signals()
    assert run(method, batch, Toy.same(batch)).total.item() == pytest.approx(4.0)  # shared: 2.0
    method, batch = two_signals(rl_rows=3)
    assert run(method, batch, Toy.same(batch)).total.item() == pytest.approx(4.0)


def test_14_nothing_is_normalised_after_the_teacher_came_in():
    batch = plain_batch(
        [1] * 4,
        reward_B=numbers([2, 2, 0, 0]),
        student_logprob_BT=numbers([[-1.0]] * 4),
        views={"teacher": view([[-0.7]] * 4)},
    )
    both = objective(
        name="sum",
        credit=chain(from_group_advantage(), from_teacher_gap()),
        loss=PolicyLoss(),
        reduction=token_mean(),
    )
    torch.testing.assert_close(advantages(both, batch)[:, 0], numbers([1.3, 1.3, -0.7, -0.7]))


def test_15_a_uniform_group_keeps_its_distillation():
    batch = opd_batch([[-1.0] * 2] * 4, [[-0.6] * 2] * 4, reward_B=numbers([0, 0, 0, 0]))
    both = Mix(parts=(Part(method=Grpo()), Part(method=Opd()))).build()
    torch.testing.assert_close(advantages(both, batch), numbers([[0.4] * 2] * 4))
    assignment, _ = both.assign(batch, {})
    assert assignment.metrics["grpo/group_advantage/uniform"] == (4.0, 4.0)
    assert (advantages(Grpo().build(), batch) == 0).all()


def test_16_group_statistics_span_the_ranks():
    batch = plain_batch([1] * 4, reward_B=numbers([1, 1, 0, 0]), student_logprob_BT=numbers([[-1.0]] * 4))
    got = advantages(Grpo().build(), batch)[:, 0]
    torch.testing.assert_close(got, numbers([0.8659, 0.8659, -0.8659, -0.8659]), atol=1e-4, rtol=0)
    # the gathered batch is assigned once; each rank then takes its rows
    assignment, _ = Grpo().build().assign(batch, {})
    rank = assignment_rows(assignment, torch.tensor([2, 3]))
    torch.testing.assert_close(rank.terms[0].value_BT[:, 0], got[2:])
    alone = plain_batch([1], reward_B=numbers([1]), student_logprob_BT=numbers([[-1.0]]))
    assert advantages(Grpo().build(), alone).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("rewards", "want"),
    [([1, NAN, 0, NAN], [0.7070, 0, -0.7070, 0]), ([1, NAN, NAN, NAN], [0] * 4), ([NAN] * 4, [0] * 4)],
)
def test_17_an_unscored_response_is_nobody_s_zero(rewards, want):
    batch = opd_batch([[-1.0]] * 4, [[-0.6]] * 4, reward_B=numbers(rewards))
    got = advantages(Grpo().build(), batch)[:, 0]
    torch.testing.assert_close(got, numbers(want), atol=1e-4, rtol=0)
    both = Mix(parts=(Part(method=Grpo()), Part(method=Opd()))).build()
    torch.testing.assert_close(advantages(both, batch)[:, 0], got + 0.4)


def test_25_a_sentinel_is_bounded_and_padding_stays_out_of_exp():
    batch = opd_batch([[-0.5, 0.0]], [[-9999.0, -9999.0]])
    batch = replace(batch, mask_BT=torch.tensor([[True, False]]))
    assert advantages(Opd(ratio_clip=10.0).build(), batch).tolist() == [[-10.0, 0.0]]
    for estimator in ("k2", "k3"):
        method = Opd(estimator=estimator).build()
        toy = Toy.same(batch)
        loss = run(method, batch, toy).total
        loss.backward()
        assert loss.isfinite()
        assert toy.theta_BT.grad is not None
        assert toy.theta_BT.grad.isfinite().all()
        assert float(toy.theta_BT.grad[0, 1]) == 0


def test_28_a_failed_row_leaves_the_distillation_and_keeps_its_reward():
    valid = [[True], [True], [False], [True]]
    batch = plain_batch(
        [1] * 4,
        reward_B=numbers([1, 1, 1, 0]),
        student_logprob_BT=numbers([[-1.0]] * 4),
        views={"teacher": view([[-2.0]] * 3 + [[-4.0]], valid)},
    )
    both = Mix(parts=(Part(method=Grpo(scale="none")), Part(method=Opd()))).build()
    assert advantages(both, batch)[:, 0].tolist() == [-0.75, -0.75, 0.25, -3.75]
    assert run(Opd().build(), batch, Toy.same(batch)).total.item() == pytest.approx((1 + 1 + 3) / 3)


def test_34_tool_tokens_are_not_scored():
    batch = opd_batch([[0.0] * 4], [[0.1, 9, 9, 0.2]])
    batch = replace(batch, mask_BT=torch.tensor([[True, False, False, True]]))
    torch.testing.assert_close(advantages(Opd().build(), batch), numbers([[0.1, 0, 0, 0.2]]))
    assert run(Opd().build(), batch, Toy.same(batch)).total.item() == pytest.approx(-0.15)


def test_35_an_empty_completion_is_skipped():
    batch = plain_batch(
        [0, 2, 2],
        reward_B=numbers([0, 1, 0]),
        student_logprob_BT=numbers([[-1.0] * 2] * 3),
        views={"teacher": view([[-0.5] * 2] * 3)},
    )
    got = advantages(Grpo(scale="none").build(), batch)
    torch.testing.assert_close(got, numbers([[0, 0], [2 / 3] * 2, [-1 / 3] * 2]))
    assert run(Grpo(scale="none").build(), batch, Toy.same(batch)).total.item() == pytest.approx(-1 / 6)


def test_42_directions_are_told_apart():
    values = {kind: float(divergence(Q.log(), P.log(), kind)) for kind in ("forward_kl", "reverse_kl", "jsd")}
    assert values == pytest.approx({"forward_kl": 0.5838, "reverse_kl": 0.5372, "jsd": 0.1329}, abs=1e-4)
    logit = Q.log().clone().requires_grad_()
    gradient = torch.autograd.grad(divergence(logit.log_softmax(-1), P.log(), "forward_kl"), logit)[0]
    torch.testing.assert_close(gradient, Q - P)


def test_a_divergence_that_was_not_measured_is_named():
    batch = opd_batch([[-1.0]], [[-0.5]], reverse_kl_BT=numbers([[0.3]]))
    method = Opd(estimator="reverse_kl").build()
    assignment, _ = method.assign(batch, {})
    with pytest.raises(ValueError, match=r"needs the reverse_kl between student and scores\.teacher"):
        method.loss(assignment, batch, StudentPass(logprob_BT=numbers([[-1.0]])))
