"""Gates: which tokens take part at all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import check
from hybrid.objective.groups import group_advantage
from hybrid.objective.ranks import linear_quantile, top_share, top_share_per_response, unit_range
from hybrid.objective.step import Phase, Step, close_gate, gate
from hybrid.types import Credit, RolloutBatch, State

Truncated = Literal["as_wrong", "skip", "vanilla_opd"]
"""What becomes of a response that hit the length limit: judged like any other, left out (of the denominator too), or
distilled without a gate."""


def outcome_agrees(
    signal_BT: Float[Tensor, "*s"], outcome_B: Float[Tensor, "*s"], *, inverse: bool = False
) -> Bool[Tensor, "*s"]:
    """True where the signal pulls a token the way the verifier's outcome does.

        agrees[b, t] = z[b] * signal[b, t] > 0,     z = +1 right, -1 wrong, 0 unknown

    Args:
      signal_BT: positive pulls the token up.
      outcome_B: the sign z, broadcast to the signal's shape.
      inverse: True where the signal pulls the other way: the ablation of OPDVR.

    Returns:
      The gate. A zero signal and an unknown outcome never agree.

    Reference:
      OPDVR, A = z * ReLU(z * r) (arXiv 2608.24696).
    """
    pull = outcome_B * signal_BT
    return pull < 0 if inverse else pull > 0


def outcome(batch: RolloutBatch, thr: float) -> Float[Tensor, " B"]:
    """+1 for a reward above `thr`, -1 for another, 0 for an unscored response."""
    reward_B = batch.need("reward")
    return torch.where(reward_B > thr, 1.0, -1.0).to(reward_B.dtype).masked_fill(reward_B.isnan(), 0)


def keep_outcome_agreeing(
    *,
    thr: float = 0.0,
    inverse: bool = False,
    free_truncated: bool = False,
    sign: Literal["outcome", "advantage"] = "outcome",
) -> Step:
    """Keeps the tokens, and the candidates of a top-k signal, that the outcome agrees with.

    `sign="advantage"` takes z from the sign of the group-relative reward, so that uniform groups drop out (GRPD of the
    paper). With `free_truncated` every token of a response that hit the length limit stays; only then is
    `truncated` needed.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        z_B = outcome(batch, thr)
        if sign == "advantage":
            correct_B = ((z_B + 1) / 2).masked_fill(z_B == 0, torch.nan)
            z_B = group_advantage(correct_B, batch.group_B).sign()
        free_B1 = batch.need("truncated")[:, None] if free_truncated else torch.zeros_like(batch.mask_BT[:, :1])
        keep_BT = outcome_agrees(credit.signal_BT, z_B[:, None].expand_as(credit.signal_BT), inverse=inverse) | free_B1
        if credit.candidate_BTK is not None:
            z_BTK = z_B[:, None, None].expand_as(credit.candidate_BTK)
            keep_BTK = outcome_agrees(credit.candidate_BTK, z_BTK, inverse=inverse) | free_B1[..., None]
            candidate_BTK = credit.candidate_BTK * keep_BTK
            keep_BT = keep_BTK.any(-1)
            credit = replace(credit, candidate_BTK=candidate_BTK, signal_BT=candidate_BTK.sum(-1))
        credit = close_gate(credit, batch, "outcome_agrees", keep_BT)
        return noting_outcome(credit, batch, outcome(batch, thr)), state

    needs = {"reward", "truncated"} if free_truncated else {"reward"}
    return Step("outcome_agrees", Phase.GATE, Phase.GATE, init=dict, apply=apply, needs=frozenset(needs))


def noting_outcome(credit: Credit, batch: RolloutBatch, outcome_B: Float[Tensor, " B"]) -> Credit:
    """Notes the share of right responses, and the mean of what is left of the signal in either direction."""
    credit = credit.noting("outcome/right", (outcome_B > 0).sum(), (outcome_B != 0).sum())
    kept_BT = credit.gate_BT & batch.mask_BT
    for name, way_BT in (("raised/mean", credit.signal_BT > 0), ("lowered/mean", credit.signal_BT < 0)):
        way_BT = way_BT & kept_BT
        credit = credit.noting(name, credit.signal_BT[way_BT].sum(), way_BT.sum())
    return credit


def agrees_with(signal_BT: Float[Tensor, "B T"], reward_advantage_B: Float[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    """True where the signal does not oppose its response's reward advantage; all True where that is 0."""
    return signal_BT * reward_advantage_B[:, None] >= 0


def group_relative(batch: RolloutBatch) -> Float[Tensor, " B"]:
    """R - mean of the group, without a deviation to divide by."""
    return group_advantage(batch.need("reward"), batch.group_B)


def keep_agreeing_with_reward(
    advantage: Callable[[RolloutBatch], Float[Tensor, " B"]] = group_relative,
) -> Step:
    """Keeps the tokens whose summed signal does not oppose the reward advantage (the sign guard of SIPO).

    Closing the gate is max(A, 0) where the advantage is positive and min(A, 0) where it is negative; at 0 all stay.
    """

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        return agrees_with(credit.signal_BT, advantage(batch))

    return gate("agrees_with_reward", fn, needs=["reward"])


def probabilistic_or(a: Float[Tensor, "*s"], b: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """High where either is: a + b - a * b, for values in [0, 1]."""
    return a + b - a * b


def token_score(
    entropy_BT: Float[Tensor, "B T"],
    gap_BT: Float[Tensor, "B T"],
    use_BT: Bool[Tensor, "B T"],
    *,
    entropy_percentile: float | None,
) -> Float[Tensor, "B T"]:
    """How much a token can teach: the student is unsure there, or far from the teacher.

        s = h + d - h * d,     h = min-max of the entropy (cut at its percentile), d = min-max of |log pT - log pS|

    Args:
      entropy_BT: the student's entropy in nats.
      gap_BT: teacher minus student log-prob in nats; its sign does not count.
      use_BT: tokens that the statistics run over; 0 elsewhere.
      entropy_percentile: entropies above this percentile count as it; None for no such cut.

    Returns:
      The score in [0, 1]; a component that is constant is 0.

    Reference:
      RSTG, Eq. 10 to 13 (arXiv 2608.00782); the min-max and the percentile are RECONSTRUCTED from TIP (2604.14084).
    """
    entropy_BT, gap_BT = entropy_BT.masked_fill(~use_BT, 0), gap_BT.masked_fill(~use_BT, 0)
    if entropy_percentile is not None and use_BT.any():
        entropy_BT = entropy_BT.clamp(max=float(linear_quantile(entropy_BT[use_BT], entropy_percentile / 100)))
    return probabilistic_or(unit_range(entropy_BT, use_BT), unit_range(gap_BT.abs(), use_BT))


def keep_telling_tokens(
    *, percent: float, scope: Literal["batch", "response"] = "batch", entropy_percentile: float | None = 98.0
) -> Step:
    """Keeps exactly ceil(percent / 100 * n) tokens of the highest `token_score`, of the batch or of each response.

    Inside a branch of a route, the batch is the rows of that branch.
    """

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        use_BT = credit.gate_BT & batch.mask_BT
        entropy_BT = batch.need("entropies")
        check(entropy_BT.isfinite() | ~use_BT, entropy_BT, "entropies must be finite on response tokens")
        score_BT = token_score(entropy_BT, credit.signal_BT, use_BT, entropy_percentile=entropy_percentile)
        pick = top_share if scope == "batch" else top_share_per_response
        return pick(score_BT, use_BT, percent)

    return gate("telling_tokens", fn, needs=["entropies"])
