"""Golden numbers of the baselines, each with its working."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hybrid.errors import MissingMeasurement
from hybrid.methods.base import MethodConfig
from hybrid.methods.constant import Constant
from hybrid.methods.dapo import Dapo
from hybrid.methods.dr_grpo import DrGrpo
from hybrid.methods.exopd import ExOpd
from hybrid.methods.grpo import Grpo
from hybrid.methods.grpo_opd import GrpoOpd
from hybrid.methods.gspo import Gspo
from hybrid.methods.kdrl import Kdrl
from hybrid.methods.opd import Opd
from hybrid.methods.random_cut import RandomCut
from hybrid.methods.reinforce_pp import ReinforcePp
from hybrid.methods.rloo import Rloo
from hybrid.methods.sdpo import Sdpo
from hybrid.methods.sft import Sft
from hybrid.methods.shaping import Shaping
from hybrid.objective.estimators import extrapolated_gap, leave_one_out_advantage, overlong_penalty, whitened
from hybrid.objective.losses import StudentPass
from hybrid.objective.random_cut import random_cut
from hybrid.types import Demonstration, RolloutBatch
from tests.batches import NAN, advantages, kl_weights, numbers, plain_batch, view

GROUP = math.sqrt(0.5) + 1e-4  # unbiased deviation of (1, 0), and eps


def rewarded(rewards: list[float], lengths: list[int], group: list[int] | None = None, **fields) -> RolloutBatch:
    width = max(lengths)
    old_BT = torch.full((len(rewards), width), -1.0)
    return plain_batch(lengths, group, reward_B=numbers(rewards), student_logprob_BT=old_BT, **fields)


def loss_of(method: MethodConfig, batch: RolloutBatch, logprob_BT: Tensor | None = None) -> Tensor:
    objective = method.build()
    assignment, _ = objective.assign(batch, objective.init())
    logprob_BT = batch.need("student_logprobs") if logprob_BT is None else logprob_BT
    return objective.loss(assignment, batch, StudentPass(logprob_BT=logprob_BT)).total


def test_dr_grpo_divides_by_neither_deviation_nor_length():
    batch = rewarded([1, 0], [1, 3])
    # A = +-0.5; loss = -(0.5 * 1 - 0.5 * 3) / (2 responses * 10)
    assert advantages(DrGrpo(max_length=10).build(), batch).tolist() == [[0.5, 0, 0], [-0.5, -0.5, -0.5]]
    assert_close(loss_of(DrGrpo(max_length=10), batch), numbers([0.05])[0])
    # Without a constant the run's limit counts.
    assert_close(loss_of(DrGrpo(), replace(batch, max_length=4)), numbers([0.125])[0])
    with pytest.raises(MissingMeasurement, match="set max_length in the method"):
        loss_of(DrGrpo(), batch)


def test_overlong_penalty_of_the_paper():
    # L_max 20, L_cache 4: nothing to 16, then a ramp to -1 at 20
    length_B = numbers([3, 16, 17, 18, 20, 25])
    assert overlong_penalty(length_B, max_length=20, buffer=4).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(length_B, max_length=20, buffer=4, penalty=0.5).tolist() == [
        0,
        0,
        -0.125,
        -0.25,
        -0.5,
        -0.5,
    ]


def test_dapo_prices_length_and_drops_uniform_groups():
    batch = rewarded([1, 0, 1, 1], [2, 4, 1, 3], [0, 0, 1, 1])
    method = Dapo(max_length=4, overlong_buffer=2)
    # group 0: lengths 2 and 4 cost 0 and 1, so R' = (1, -1), mean 0, deviation sqrt(2)
    high = 1 / (math.sqrt(2) + 1e-4)
    expected = [[high] * 2 + [0] * 2, [-high] * 4, [0] * 4, [0] * 4]
    assert_close(advantages(method.build(), batch), numbers(expected))
    # the uniform group leaves the denominator: 2 and 4 tokens
    assert_close(loss_of(method, batch), numbers([-(2 * high - 4 * high) / 6])[0])


def test_dapo_without_dynamic_sampling_keeps_uniform_groups_in_the_denominator():
    batch = rewarded([1, 0, 1, 1], [2, 4, 1, 3], [0, 0, 1, 1])
    A = 0.5 / GROUP
    assert_close(loss_of(Dapo(), batch), numbers([2 * A / 6])[0])
    assert_close(loss_of(Dapo(dynamic_sampling=False), batch), numbers([2 * A / 10])[0])


def test_dapo_clips_higher_than_lower():
    batch = rewarded([1, 0], [1, 1])
    A = 0.5 / GROUP
    # ratios 2 and 0.5 are clipped to 1.28 for the right answer and to 0.8 for the wrong one
    logprob_BT = batch.need("student_logprobs") + numbers([[math.log(2)], [math.log(0.5)]])
    assert_close(loss_of(Dapo(), batch, logprob_BT), numbers([-(1.28 * A - 0.8 * A) / 2])[0])


def test_dapo_overlong_filtering_drops_truncated_responses():
    batch = rewarded([1, 0], [1, 2], truncated_B=torch.tensor([True, False]))
    A = 0.5 / GROUP
    assert_close(advantages(Dapo(drop_truncated=True).build(), batch), numbers([[0, 0], [-A, -A]]))


def test_dapo_refuses_a_ramp_longer_than_the_limit():
    with pytest.raises(ValueError, match=r"overlong_buffer \(4096\) must not exceed max_length \(100\)"):
        Dapo(max_length=100)


def test_gspo_has_one_ratio_per_response():
    batch = rewarded([1, 0], [2, 1])
    A = 0.5 / GROUP
    logprob_BT = batch.need("student_logprobs") + numbers([[0.0002, 0.0002], [-0.01, 0]])
    # s = exp(0.0002), within (1 - 3e-4, 1 + 4e-4); exp(-0.01) is clipped to 1 - 3e-4 for the negative advantage
    expected = -(math.exp(0.0002) * A - (1 - 3e-4) * A) / 2
    assert_close(loss_of(Gspo(), batch, logprob_BT), numbers([expected])[0])
    shifted_BT = batch.need("student_logprobs") + numbers([[0.5, -0.4996], [-0.01, 0]])
    assert_close(loss_of(Gspo(), batch, shifted_BT), numbers([expected])[0])


def test_rloo_compares_with_the_others():
    rewards, group = numbers([1, 0, 0, 0.5, NAN, 1]), torch.tensor([0, 0, 0, 1, 1, 2])
    # group 0: 1 - 0, 0 - 1/2, 0 - 1/2; group 1 has one scored response, group 2 one response
    assert_close(leave_one_out_advantage(rewards, group), numbers([1, -0.5, -0.5, 0, 0, 0]))
    batch = rewarded([1, 0, 0], [2, 1, 1])
    # -(1 * 2 - 0.5 - 0.5) / 3 responses; as a token mean / 4 tokens
    assert_close(loss_of(Rloo(), batch), numbers([-1 / 3])[0])
    assert_close(loss_of(Rloo(reduction="token_mean"), batch), numbers([-1 / 4])[0])


def test_reinforce_pp_whitens_over_all_tokens():
    batch = rewarded([1, 0], [3, 1])
    # tokens (1, 1, 1, 0): mean 3/4, deviation sqrt(3)/4
    high, low = 0.25 / (math.sqrt(3) / 4), -0.75 / (math.sqrt(3) / 4)
    assert_close(advantages(ReinforcePp().build(), batch), numbers([[high] * 3, [low, 0, 0]]))
    # responses (1, 0): mean 1/2, deviation 1/2
    responses = ReinforcePp(over="responses").build()
    assert_close(advantages(responses, batch), numbers([[1, 1, 1], [-1, 0, 0]]))


def test_reinforce_pp_with_baseline_takes_the_group_off_first():
    batch = rewarded([3, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1])
    # centred (1, -1, 0, 0): mean 0, deviation sqrt(1/2)
    root = math.sqrt(2)
    assert_close(advantages(ReinforcePp(baseline="group").build(), batch), numbers([[root], [-root], [0], [0]]))


def test_whitening_leaves_equal_values_and_unused_entries_at_zero():
    use_BT = torch.tensor([[True, True], [True, False]])
    assert whitened(numbers([[0.1, 0.1], [0.1, 9]]), use_BT).abs().max() < 1e-10
    assert whitened(numbers([[1, 1], [0, 9]]), torch.zeros_like(use_BT)).tolist() == [[0, 0], [0, 0]]


def test_reinforce_pp_leaves_an_unscored_response_out():
    batch = rewarded([1, 0, NAN], [1, 1, 1])
    assert_close(advantages(ReinforcePp().build(), batch), numbers([[1], [-1], [0]]))


@pytest.mark.parametrize(("lam", "advantage"), [(1.0, 0.6), (1.25, 0.8)])
def test_exopd_numbers_of_g_opd(lam: float, advantage: float):
    batch = plain_batch(
        [1],
        student_logprob_BT=numbers([[-1.0]]),
        views={"teacher": view([[-0.4]]), "reference": view([[-1.2]])},
    )
    assert_close(advantages(ExOpd(lam=lam).build(), batch), numbers([[advantage]]))


def test_exopd_extrapolates_only_upwards_when_told():
    t, s, r = numbers([-0.4, -0.4]), numbers([-1.0, -1.0]), numbers([-1.2, -0.2])
    assert_close(extrapolated_gap(t, s, r, lam=1.25), numbers([0.8, 0.55]))
    assert_close(extrapolated_gap(t, s, r, lam=1.25, positive_only=True), numbers([0.8, 0.6]))


def test_exopd_needs_both_scorers_on_a_token():
    views = {"teacher": view([[-0.4, -0.4]], [[True, False]]), "reference": view([[-1.2, -1.2]])}
    batch = plain_batch([2], student_logprob_BT=numbers([[-1.0, -1.0]]), views=views)
    assert_close(advantages(ExOpd(ratio_clip=0.7).build(), batch), numbers([[0.7, 0]]))


def test_sft_is_a_mean_over_prompts_of_token_means():
    text = Demonstration(
        ids_BU=torch.zeros(3, 2, dtype=torch.long), mask_BU=torch.tensor([[True, True], [True, True], [True, False]])
    )
    batch = plain_batch([1, 1, 1], [0, 0, 1], demonstration=text)
    objective = Sft().build()
    assignment, _ = objective.assign(batch, objective.init())
    student = StudentPass(
        logprob_BT=torch.zeros(3, 1), demonstration_logprob_BU=numbers([[-1, -3], [-50, -50], [-4, -50]])
    )
    loss = objective.loss(assignment, batch, student)
    # prompt 0: its text once, mean 2; prompt 1: 4
    assert_close(loss.sft, numbers([3])[0])
    assert_close(loss.total, loss.sft)


def gaps(rewards: list[float], gap_BT: list[list[float]], group: list[int] | None = None) -> RolloutBatch:
    lengths = [len(row) for row in gap_BT]
    width = max(lengths)
    teacher = [[value - 1 for value in row] + [0.0] * (width - len(row)) for row in gap_BT]
    batch = rewarded(rewards, lengths, group)
    return replace(batch, views={"teacher": replace(view(teacher), valid_BT=batch.mask_BT)})


def test_the_teacher_is_added_after_the_reward_is_normalised():
    """Pitfall 14: [1, 1, -1, -1] and a constant 0.3 are [1.3, 1.3, -0.7, -0.7]; a z-score would be [1, 1, -1, -1]."""
    batch = gaps([2, 2, 0, 0], [[0.3]] * 4)
    A = 1 / (math.sqrt(4 / 3) + 1e-4)
    expected = numbers([[A + 0.3], [A + 0.3], [-A + 0.3], [-A + 0.3]])
    assert_close(advantages(GrpoOpd().build(), batch), expected)
    assert_close(advantages(GrpoOpd(scale="none").build(), batch), numbers([[1.3], [1.3], [-0.7], [-0.7]]))


def test_a_uniform_group_still_distils():
    """Pitfall 15: equal rewards and a gap of 0.4 give 0.4 everywhere."""
    batch = gaps([0] * 4, [[0.4, 0.4]] * 4)
    assert_close(advantages(GrpoOpd().build(), batch), torch.full((4, 2), 0.4))


def test_an_unscored_response_still_distils():
    """Pitfall 17."""
    A = 0.5 / GROUP
    batch = gaps([1, NAN, 0], [[0.4], [0.4], [0.4]])
    assert_close(advantages(GrpoOpd().build(), batch), numbers([[A + 0.4], [0.4], [-A + 0.4]]))


def test_a_failed_teacher_row_keeps_its_reward():
    """Pitfall 28."""
    batch = gaps([1, 0], [[0.4], [0.4]])
    lost = replace(batch.view("teacher"), valid_BT=torch.tensor([[True], [False]]))
    A = 0.5 / GROUP
    assert_close(advantages(GrpoOpd().build(), replace(batch, views={"teacher": lost})), numbers([[A + 0.4], [-A]]))


def test_a_sum_of_losses_has_two_denominators():
    batch = gaps([1, 0], [[0.4, 0.2], [0.6, 0.8]])
    lost = replace(batch.view("teacher"), valid_BT=torch.tensor([[True, True], [False, False]]))
    batch = replace(batch, views={"teacher": lost})
    # the reward sums to 0; the gap is a mean over the two scored tokens
    assert_close(loss_of(GrpoOpd(combine="losses", coef=0.5), batch), numbers([-0.5 * 0.3])[0])
    assert_close(loss_of(GrpoOpd(combine="advantages", coef=0.5), batch), numbers([-0.5 * 0.6 / 4])[0])


def test_shaping_compares_shaped_returns():
    batch = gaps([1, 0], [[0.5, -1.0], [0.25, 0.0]])
    # R' = 1 + 2 * -0.5 = 0 and 0 + 2 * 0.25 = 0.5, mean 0.25
    assert_close(advantages(Shaping(coef=2).build(), batch), numbers([[-0.25] * 2, [0.25] * 2]))
    # a constant teacher term shifts every return alike and is gone, as any baseline takes it
    assert_close(advantages(Shaping().build(), gaps([2, 0], [[0.3], [0.3]])), numbers([[1], [-1]]))


def test_shaping_gives_a_token_the_return_from_it_on():
    batch = gaps([1, 0], [[0.5, -1.0], [0.25, 0.5]])
    method = Shaping(estimator="return_to_go", coef=2)
    # A_group = +-0.5, then 2 * the gaps from the token on
    expected = numbers([[0.5 - 1.0, 0.5 - 2.0], [-0.5 + 1.5, -0.5 + 1.0]])
    assert_close(advantages(method.build(), batch), expected)


def test_shaping_leaves_a_response_without_teacher_out_of_the_comparison():
    batch = gaps([1, 0, 0], [[0.5], [0.5], [9.0]])
    lost = replace(batch.view("teacher"), valid_BT=torch.tensor([[True], [True], [False]]))
    batch = replace(batch, views={"teacher": lost})
    assert_close(advantages(Shaping().build(), batch), numbers([[0.5], [-0.5], [0]]))


def test_shaping_refuses_to_rescale_the_teacher():
    with pytest.raises(ValueError, match=r"use scale: none, or estimator: return_to_go"):
        Shaping(scale="group")
    Shaping(scale="group", estimator="return_to_go")


@pytest.mark.parametrize(("step", "beta"), [(0, 5e-3), (1, 4.95e-3), (40, 3e-3), (80, 1e-3), (200, 1e-3)])
def test_kdrl_anneals_its_k2_loss(step: int, beta: float):
    batch = replace(gaps([1, 0], [[0.5], [-1.0]]), step=step)
    assert_close(kl_weights(Kdrl().build(), batch), torch.full((2, 1), beta))
    # k2 = (0.25 / 2 + 1 / 2) / 2; the reward part sums to 0
    assert_close(loss_of(Kdrl(), batch), numbers([beta * 0.3125])[0])


def test_kdrl_masks():
    batch = gaps([1, 0, 0, 0], [[0.5]] * 4, [0, 0, 1, 1])
    one = Kdrl(beta=1.0)
    wrong, groups = (
        one.model_copy(update={"mask": "wrong_responses"}),
        one.model_copy(update={"mask": "all_wrong_groups"}),
    )
    assert kl_weights(one.build(), batch).flatten().tolist() == [1, 1, 1, 1]
    assert kl_weights(wrong.build(), batch).flatten().tolist() == [0, 1, 1, 1]
    assert kl_weights(groups.build(), batch).flatten().tolist() == [0, 0, 1, 1]


def test_sdpo_is_a_convex_sum():
    views = {"right": view([[-0.5, -2.0], [-1.0, 0.0]], [[True, True], [True, False]])}
    batch = replace(rewarded([1, 0], [2, 1]), views=views)
    A = 0.5 / GROUP
    objective = Sdpo(w=0.25).build()
    # gaps (0.5, -1) and (0); the advantages before each reduction are summed by weight
    expected = numbers([[0.75 * A + 0.25 * 0.5, 0.75 * A - 0.25], [-0.75 * A, 0]])
    assert_close(advantages(objective, batch), expected)
    # GRPO: token mean -(2A - A) / 3; self-distillation: mean over responses of (mean (0.5, -1), 0)
    assert_close(loss_of(Sdpo(w=0.25), batch), numbers([-0.75 * A / 3 + 0.25 * 0.125])[0])
    assert_close(loss_of(Sdpo(w=0.0), batch), loss_of(Grpo(), batch))


def test_sdpo_may_take_another_self_teacher():
    assert Sdpo().views.keys() == {"right"}
    assert Sdpo(view="teacher").views == {}
    assert Sdpo(view="teacher").build().needs == {"reward", "scores.teacher", "student_logprobs"}


def test_constant_knows_neither_reward_nor_teacher():
    batch = plain_batch([2, 1], student_logprob_BT=torch.zeros(2, 2))
    assert_close(advantages(Constant().build(), batch), numbers([[-0.1, -0.1], [-0.1, 0]]))
    assert_close(loss_of(Constant(value=2), batch), numbers([-2])[0])


def test_random_cut_keeps_its_share_on_average():
    kl_BT = torch.rand(400, 40, generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(kl_BT, dtype=torch.bool)
    keep_BT = random_cut(kl_BT, mask_BT, seed=0, step=0, keep_share=0.45)
    kept_B = keep_BT.sum(-1)
    # uniform on [0, 0.9] of 40 tokens, rounded up: mean 18.5, and no response is like the next
    assert abs(kept_B.double().mean() - 18.5) < 1.5
    assert kept_B.unique().numel() > 30
    # a prefix: once closed, closed
    assert (keep_BT[:, 1:] <= keep_BT[:, :-1]).all()


@given(st.integers(0, 100), st.floats(0.01, 1), st.integers(0, 3))
def test_random_cut_depends_on_the_response_alone(seed: int, keep_share: float, min_keep: int):
    kl_BT = torch.rand(6, 5, generator=torch.Generator().manual_seed(seed))
    mask_BT = torch.arange(5) < torch.tensor([0, 1, 2, 3, 4, 5])[:, None]
    cut = {"seed": seed, "step": 3, "keep_share": keep_share, "min_keep": min_keep}
    keep_BT = random_cut(kl_BT, mask_BT, **cut)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    assert random_cut(kl_BT[order], mask_BT[order], **cut).equal(keep_BT[order])
    # a record holds the float32 of a run as float64
    assert random_cut(kl_BT.float().double(), mask_BT, **cut).equal(random_cut(kl_BT.float(), mask_BT, **cut))
    assert (keep_BT.sum(-1) >= mask_BT.sum(-1).clamp(max=min_keep)).all()
    assert not (keep_BT & ~mask_BT).any()


def test_random_cut_changes_with_seed_and_step():
    kl_BT = torch.rand(20, 50, generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(kl_BT, dtype=torch.bool)
    first, other, later = (
        random_cut(kl_BT, mask_BT, seed=seed, step=step, keep_share=0.5) for seed, step in ((0, 0), (1, 0), (0, 1))
    )
    assert not first.equal(other)
    assert not first.equal(later)


def test_random_cut_that_keeps_all_is_plain_distillation():
    batch = replace(plain_batch([3, 2]), reverse_kl_BT=numbers([[0.2, 0.5, 0.1], [0.4, 0.3, 9]]))
    objective, plain = RandomCut(keep_share=1.0).build(), Opd(estimator="reverse_kl", top_k=64).build()
    assert_close(kl_weights(objective, batch), kl_weights(plain, batch))
    half = RandomCut(keep_share=0.5).build()
    assert kl_weights(half, batch).sum() < 5


@pytest.mark.parametrize("method", [DrGrpo(), Dapo(), Gspo(), Rloo()], ids=lambda method: method.name)
def test_equal_rewards_give_no_advantage(method: MethodConfig):
    batch = replace(rewarded([0.1] * 3, [2, 1, 3]), max_length=3)
    assert (advantages(method.build(), batch) == 0).all()


def test_a_teacher_that_equals_the_student_leaves_plain_rl():
    batch = gaps([1, 0, 1], [[0.0, 0.0], [0.0], [0.0]])
    assert_close(advantages(GrpoOpd().build(), batch), advantages(Grpo().build(), batch))
    assert_close(loss_of(Kdrl(), batch), loss_of(Grpo(), batch))
