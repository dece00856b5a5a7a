"""Gates: which tokens take part at all."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.objective.groups import group_advantage
from hybrid.objective.step import Phase, Step, close_gate, gate
from hybrid.types import Credit, RolloutBatch, State

Truncated = Literal["as_wrong", "skip", "vanilla_opd"]
"""What becomes of a response that hit the length limit: judged like any other, dropped, or distilled without a gate."""


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
    truncated: Truncated = "as_wrong",
    inverse: bool = False,
    sign: Literal["outcome", "advantage"] = "outcome",
) -> Step:
    """Keeps the tokens, and the candidates of a top-k signal, that the outcome agrees with.

    `sign="advantage"` takes z from the sign of the group-relative reward, so that uniform groups drop out (GRPD of the
    paper). Truncated responses follow `truncated`; only then is the measurement `truncated` needed.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        z_B = outcome(batch, thr)
        if sign == "advantage":
            correct_B = ((z_B + 1) / 2).masked_fill(z_B == 0, torch.nan)
            z_B = group_advantage(correct_B, batch.group_B).sign()
        free_BT = torch.zeros_like(batch.mask_BT)
        keep_BT = outcome_agrees(credit.signal_BT, z_B[:, None].expand_as(credit.signal_BT), inverse=inverse)
        if truncated != "as_wrong":
            cut_BT = batch.need("truncated")[:, None].expand_as(batch.mask_BT)
            free_BT = cut_BT if truncated == "vanilla_opd" else free_BT
            keep_BT = (keep_BT & ~cut_BT) | free_BT
        if credit.candidate_BTK is not None:
            z_BTK = z_B[:, None, None].expand_as(credit.candidate_BTK)
            keep_BTK = outcome_agrees(credit.candidate_BTK, z_BTK, inverse=inverse) | free_BT[..., None]
            if truncated == "skip":
                keep_BTK = keep_BTK & ~cut_BT[..., None]
            candidate_BTK = credit.candidate_BTK * keep_BTK
            keep_BT = keep_BTK.any(-1)
            credit = replace(credit, candidate_BTK=candidate_BTK, signal_BT=candidate_BTK.sum(-1))
        return close_gate(credit, batch, "outcome_agrees", keep_BT), state

    needs = {"reward"} if truncated == "as_wrong" else {"reward", "truncated"}
    return Step("outcome_agrees", Phase.GATE, Phase.GATE, init=dict, apply=apply, needs=frozenset(needs))


def agrees_with(signal_BT: Float[Tensor, "B T"], reward_advantage_B: Float[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    """True where the signal does not oppose its response's reward advantage; all True where that is 0."""
    return signal_BT * reward_advantage_B[:, None] >= 0


def keep_agreeing_with_reward() -> Step:
    """Keeps the tokens whose summed signal does not oppose the reward advantage (the sign guard of SIPO)."""

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        return agrees_with(credit.signal_BT, group_advantage(batch.need("reward"), batch.group_B))

    return gate("agrees_with_reward", fn, needs=["reward"])
