"""Weights: how strongly each kept token counts; never negative."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import check
from hybrid.objective import schedules
from hybrid.objective.gates import outcome
from hybrid.objective.groups import Scale, group_advantage
from hybrid.objective.ranks import masked_median
from hybrid.objective.step import Step, weight
from hybrid.types import Credit, RolloutBatch


def weight_by_advantage_size(*, thr: float = 0.0, scale: Scale = "none", eps: float = 1e-6, u: float = 0.0) -> Step:
    """|a| + u, with `a` the group-relative advantage of correctness (GRPD of the authors' code).

    An unscored response and a group of one have a = 0.
    """

    def fn(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        z_B = outcome(batch, thr)
        correct_B = ((z_B + 1) / 2).masked_fill(z_B == 0, torch.nan)
        size_B = group_advantage(correct_B, batch.group_B, scale=scale, eps=eps).abs() + u
        return size_B[:, None].expand_as(credit.weight_BT)

    return weight("advantage_size", fn, needs=["reward"])


def weight_by_schedule(number: schedules.Scale) -> Step:
    """The same number for every token, which may be a schedule of the step; never negative."""
    return weight("schedule", lambda credit, batch: torch.full_like(credit.weight_BT, schedules.at(number, batch.step)))


def weight_by_teacher_accuracy() -> Step:
    """The share of the teacher's own answers to the prompt that are right: its confidence (omega of RSTG)."""

    def fn(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        accuracy_B = batch.need("teacher_accuracy")
        used_B = credit.gate_BT.any(-1)
        ok_B = (accuracy_B >= 0) & (accuracy_B <= 1)
        check(ok_B | ~used_B, accuracy_B, "teacher_accuracy must be in [0, 1]")
        return accuracy_B[:, None].expand_as(credit.weight_BT)

    return weight("teacher_accuracy", fn, needs=["teacher_accuracy"])


def agreement_share(
    signal_BT: Float[Tensor, "B T"],
    outcome_B: Float[Tensor, " B"],
    use_BT: Bool[Tensor, "B T"],
    *,
    beta: float,
    eps: float,
) -> Float[Tensor, "B T"]:
    """A soft version of OPDVR's gate: sigmoid(beta * z * r / nu), nu = max(median |r| of the response, eps).

    Args:
      signal_BT: r, in nats.
      outcome_B: z: +1 right, -1 wrong, 0 unknown.
      use_BT: tokens that the median runs over.
      beta: sharpness; to infinity it is the hard gate.
      eps: smallest scale.

    Reference:
      R2-OPD (arXiv 2609.35517). Differs: the median of an even number is the mean of the middle two; eps is ours.
    """
    scale_B = masked_median(signal_BT.abs(), use_BT).clamp(min=eps)
    return torch.sigmoid(beta * outcome_B[:, None] * signal_BT / scale_B[:, None])


def mass_preserving(
    share_BT: Float[Tensor, "B T"], size_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Rescales shares per response so that the summed size of the coefficients stays what it was.

        w[t] = s[t] * sum_j a[j] / sum_j s[j] a[j],     sums over the used tokens

    Args:
      share_BT: non-negative share of each token.
      size_BT: non-negative size of the coefficient that it multiplies.
      use_BT: tokens that take part.

    Returns:
      Weights, 0 elsewhere and where a response has no mass left.

    Raises:
      HybridError: a share or a size of a used token is negative or not finite.

    Reference:
      R2-OPD, the factor sum |r| / sum g |r| (arXiv 2609.35517). Differs: nothing.
    """
    check(((share_BT >= 0) & share_BT.isfinite()) | ~use_BT, share_BT, "share_BT must be finite and >= 0")
    check(((size_BT >= 0) & size_BT.isfinite()) | ~use_BT, size_BT, "size_BT must be finite and >= 0")
    share_BT, size_BT = share_BT.masked_fill(~use_BT, 0), size_BT.masked_fill(~use_BT, 0)
    before_B, after_B = size_BT.sum(-1), (share_BT * size_BT).sum(-1)
    scale_B = torch.where(after_B > 0, before_B / after_B.clamp(min=torch.finfo(after_B.dtype).tiny), 0)
    return share_BT * scale_B[:, None]


def weight_by_outcome_agreement(*, thr: float, beta: float, eps: float, plain_truncated: bool) -> Step:
    """`agreement_share`, made mass-preserving: re-weights the gap towards what the outcome agrees with (R2-OPD).

    An unscored response has outcome 0, which is plain distillation; so has a truncated one with `plain_truncated`.
    """

    def fn(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        outcome_B = outcome(batch, thr)
        if plain_truncated:
            outcome_B = outcome_B.masked_fill(batch.need("truncated"), 0)
        share_BT = agreement_share(credit.signal_BT, outcome_B, credit.gate_BT, beta=beta, eps=eps)
        return mass_preserving(share_BT, credit.signal_BT.abs(), credit.gate_BT)

    return weight("outcome_agreement", fn, needs=["reward", "truncated"] if plain_truncated else ["reward"])
