"""Advantages of the baselines: leave-one-out, whitened, shaped, extrapolated, constant."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.objective.groups import group_advantage, group_index, group_sum
from hybrid.objective.schedules import Number, at
from hybrid.objective.signals import RewardOf, clipped, teacher_gap
from hybrid.objective.step import Signal, Step, signal
from hybrid.types import RolloutBatch


def leave_one_out_advantage(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """How much better a response is than the mean of the others.

        A[i] = R[i] - mean_{j != i} R[j] = n / (n - 1) * (R[i] - mean_g R),     n scored responses in the group

    Args:
      reward_B: rewards; NaN is an unscored response, which is no one's sibling.
      group_B: prompt of each response.

    Returns:
      The advantage; 0 for unscored rows and where there is no other scored response.

    Reference:
      Ahmadian et al., Back to basics, the RLOO estimator (arXiv 2402.14740). Differs: nothing.
    """
    index_B, num_groups = group_index(group_B)
    count_B = group_sum((~reward_B.isnan()).to(reward_B.dtype), index_B, num_groups)[index_B]
    return group_advantage(reward_B, group_B) * count_B / (count_B - 1).clamp(min=1)


def from_leave_one_out() -> Step:
    """The leave-one-out advantage, the same for every token of a response."""

    def fn(batch: RolloutBatch) -> Signal:
        advantage_B = leave_one_out_advantage(batch.need("reward"), batch.group_B)
        return Signal(advantage_B[:, None].expand(batch.mask_BT.shape), batch.mask_BT)

    return signal("leave_one_out", fn, needs=["reward"])


def whitened(value_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"], *, eps: float = 1e-4) -> Float[Tensor, "B T"]:
    """Zero mean and unit (population) deviation over the used entries of the whole batch.

        (x - mean x) / max(std x, eps)

    Args:
      value_BT: any values.
      use_BT: entries that count; the others become 0.
      eps: smallest deviation that is divided by, so that equal values become 0.

    Reference:
      REINFORCE++, global advantage normalisation (arXiv 2501.03262); max(., 1e-4) is the clamp of the variance at 1e-8
      in the authors' OpenRLHF.
    """
    count = use_BT.sum().clamp(min=1)
    centred_BT = (value_BT - value_BT.masked_fill(~use_BT, 0).sum() / count).masked_fill(~use_BT, 0)
    return centred_BT / ((centred_BT**2).sum() / count).sqrt().clamp(min=eps)


def from_whitened_reward(
    *, baseline: Literal["none", "group"] = "none", over: Literal["tokens", "responses"] = "tokens", eps: float = 1e-4
) -> Step:
    """The reward, less its group's mean with `baseline="group"`, whitened over the batch (REINFORCE++).

    `over` says what the statistics count: every token (the authors' code: long responses weigh more) or every response.
    An unscored response takes no part and has advantage 0.
    """

    def fn(batch: RolloutBatch) -> Signal:
        reward_B = batch.need("reward")
        scored_B1 = ~reward_B.isnan()[:, None]
        value_B = group_advantage(reward_B, batch.group_B) if baseline == "group" else reward_B
        value_B1 = value_B.nan_to_num(nan=0.0)[:, None]
        if over == "responses":
            advantage_BT = whitened(value_B1, scored_B1, eps=eps).expand(batch.mask_BT.shape)
        else:
            advantage_BT = whitened(value_B1.expand(batch.mask_BT.shape), batch.mask_BT & scored_B1, eps=eps)
        return Signal(advantage_BT, batch.mask_BT)

    return signal("whitened_reward", fn, needs=["reward"])


def overlong_penalty(
    length_B: Float[Tensor, " B"], *, max_length: int, buffer: int, penalty: float = 1.0
) -> Float[Tensor, " B"]:
    """What DAPO adds to the reward of a response that comes near the length limit.

        0                               where length <= max_length - buffer
        (max_length - buffer - length) / buffer       within the buffer
        -1                              where length > max_length;     all times `penalty`

    Args:
      length_B: response tokens.
      max_length: the limit L_max, buffer included.
      buffer: length of the ramp, L_cache.
      penalty: size of the full punishment.

    Reference:
      DAPO, Eq. 13 (arXiv 2503.14476). Differs: nothing.
    """
    return penalty * ((max_length - buffer - length_B) / buffer).clamp(min=-1, max=0)


def overlong_reward(*, max_length: int, buffer: int, penalty: float) -> RewardOf:
    """The reward plus the overlong penalty of each response."""

    def value(batch: RolloutBatch) -> Float[Tensor, " B"]:
        length_B = batch.mask_BT.sum(-1).to(batch.dtype)
        return batch.need("reward") + overlong_penalty(length_B, max_length=max_length, buffer=buffer, penalty=penalty)

    return RewardOf(value)


def gap_of(batch: RolloutBatch, clip: float | None) -> Float[Tensor, "B T"]:
    """The gap log pT - log pS where the teacher scored a response token; 0 elsewhere."""
    scores = batch.view("teacher")
    gap_BT = clipped(teacher_gap(scores.logprob_BT, batch.need("student_logprobs")), clip)
    return gap_BT.masked_fill(~(scores.valid_BT & batch.mask_BT), 0)


def shaped_return(*, coef: Number, clip: float | None = None) -> RewardOf:
    """R[i] + coef * sum_t (log pT - log pS): the sum of token rewards; NaN where the teacher scored no token."""

    def value(batch: RolloutBatch) -> Float[Tensor, " B"]:
        lost_B = batch.mask_BT.any(-1) & ~(batch.view("teacher").valid_BT & batch.mask_BT).any(-1)
        total_B = batch.need("reward") + at(coef, batch.step) * gap_of(batch, clip).sum(-1)
        return total_B.masked_fill(lost_B, torch.nan)

    return RewardOf(value, frozenset({"reward", "scores.teacher", "student_logprobs"}))


def from_gap_to_go(*, coef: Number = 1.0, clip: float | None = None) -> Step:
    """A return, coef * sum_{u >= t} (log pT - log pS): the teacher's part of the return from a token on.

    A token without a score adds nothing and still has a return, that of the tokens after it.
    """

    def fn(batch: RolloutBatch) -> Signal:
        to_go_BT = gap_of(batch, clip).flip(-1).cumsum(-1).flip(-1)
        scored_BT = batch.view("teacher").valid_BT & batch.mask_BT
        return Signal(at(coef, batch.step) * to_go_BT, batch.mask_BT & scored_BT.any(-1, keepdim=True))

    return signal("gap_to_go", fn, needs=["scores.teacher", "student_logprobs"])


def extrapolated_gap(
    teacher_logprob_BT: Float[Tensor, "*s"],
    student_logprob_BT: Float[Tensor, "*s"],
    reference_logprob_BT: Float[Tensor, "*s"],
    *,
    lam: float = 1.25,
    positive_only: bool = False,
) -> Float[Tensor, "*s"]:
    """The gap to a target beyond the teacher, seen from a reference model.

        A = -(s - r - lam (t - r)) = (t - s) + (lam - 1) (t - r)

    Args:
      teacher_logprob_BT: t, in nats.
      student_logprob_BT: s.
      reference_logprob_BT: r, usually the student before training or the teacher before its RL.
      lam: 1 is plain distillation, above 1 extrapolates.
      positive_only: extrapolates only where t > r (the gate of MOPD, arXiv 2609.23377, in our words).

    Reference:
      G-OPD / ExOPD (arXiv 2602.12125). Differs: nothing.
    """
    beyond_BT = teacher_logprob_BT - reference_logprob_BT
    if positive_only:
        beyond_BT = beyond_BT.clamp(min=0)
    return teacher_logprob_BT - student_logprob_BT + (lam - 1) * beyond_BT


def from_extrapolated_gap(*, lam: Number = 1.25, positive_only: bool = False, clip: float | None = None) -> Step:
    """The extrapolated gap where teacher and reference both scored the token."""

    def fn(batch: RolloutBatch) -> Signal:
        teacher, reference = batch.view("teacher"), batch.view("reference")
        value_BT = extrapolated_gap(
            teacher.logprob_BT,
            batch.need("student_logprobs"),
            reference.logprob_BT,
            lam=at(lam, batch.step),
            positive_only=positive_only,
        )
        return Signal(clipped(value_BT, clip), teacher.valid_BT & reference.valid_BT)

    return signal("extrapolated_gap", fn, needs=["scores.teacher", "scores.reference", "student_logprobs"])


def from_constant(value: Number) -> Step:
    """The same advantage for every token of every response."""

    def fn(batch: RolloutBatch) -> Signal:
        value_BT = torch.full(
            batch.mask_BT.shape, at(value, batch.step), dtype=batch.dtype, device=batch.mask_BT.device
        )
        return Signal(value_BT, batch.mask_BT)

    return signal("constant", fn, needs=[])
