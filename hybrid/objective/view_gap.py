"""Weights from two views of one scorer: which responses and tokens hang on what only the full view shows (VA-OPD)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.errors import HybridError
from hybrid.objective.groups import group_index, group_sum
from hybrid.objective.step import Phase, Signal, Step, close_gate, signal, weight
from hybrid.types import Credit, RolloutBatch, State

SIGMA_EPS = 1e-6
"""Added to the siblings' standard deviation (VA-OPD, Eq. 3)."""


def view_advantage(
    full_logprob_BT: Float[Tensor, "B T"], degraded_logprob_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """How much likelier the full view makes the sampled token: max(0, log p(y | full) - log p(y | degraded)).

    Args:
      full_logprob_BT: nats.
      degraded_logprob_BT: nats.
      use_BT: tokens that both views scored; 0 elsewhere.

    Reference:
      VA-OPD, Eq. 2 (arXiv 2605.21924). Differs: nothing.
    """
    return (full_logprob_BT - degraded_logprob_BT).masked_fill(~use_BT, 0).clamp(min=0)


def sibling_softmax(
    score_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"], use_B: Bool[Tensor, " B"], *, tau: float, eps: float
) -> Float[Tensor, " B"]:
    """Shares the weight 1 of each prompt among its responses, by their z-scored scores.

        z[k] = (s[k] - mean) / (std + eps),     w = softmax(z / tau),     population std over the siblings

    Args:
      score_B: score of each response.
      group_B: prompt of each response.
      use_B: responses that take part; the others get 0, and neither mean nor std sees them.
      tau: temperature; small values give all to the best.
      eps: added to the standard deviation.

    Returns:
      Weights that sum to 1 in every prompt with a response that takes part; equal scores give equal weights.

    Reference:
      VA-OPD, Eq. 3 and 4 (arXiv 2605.21924). Differs: nothing.
    """
    index_B, num_groups = group_index(group_B)
    score_B = score_B.masked_fill(~use_B, 0)
    count_G = group_sum(use_B.to(score_B.dtype), index_B, num_groups).clamp(min=1)
    centred_B = (score_B - (group_sum(score_B, index_B, num_groups) / count_G)[index_B]).masked_fill(~use_B, 0)
    std_G = (group_sum(centred_B**2, index_B, num_groups) / count_G).sqrt()
    logit_B = (centred_B / (std_G[index_B] + eps) / tau).masked_fill(~use_B, -torch.inf)
    best_G = score_B.new_full((num_groups,), -torch.inf).scatter_reduce(0, index_B, logit_B, "amax")
    mass_B = (logit_B - best_G[index_B]).exp().masked_fill(~use_B, 0)
    return mass_B / group_sum(mass_B, index_B, num_groups)[index_B].masked_fill(~use_B, 1)


def rank_split(
    score_BT: Float[Tensor, "B T"],
    use_BT: Bool[Tensor, "B T"],
    *,
    p_v: float,
    lam: float,
    uniform_without_score: bool = False,
) -> Float[Tensor, "B T"]:
    """Gives the best-scored share p_v of a response's tokens the mass lam, evenly, and the rest 1 - lam.

        lam / |V|  on the ceil(p_v * T) tokens with the largest score (at least 1),     (1 - lam) / |L|  on the others

    Args:
      score_BT: score of each token; ties keep token order.
      use_BT: the tokens that take part.
      p_v: share of high tokens, in (0, 1].
      lam: mass of the high tokens, in [0, 1]; where no token is low they take all of it.
      uniform_without_score: a response whose scores are all 0 gives every token 1 / T (ours; not in the paper).

    Returns:
      Weights that sum to 1 in every response with a token.

    Reference:
      VA-OPD, Eq. 5 (arXiv 2605.21924); ceil and tie order as in the authors' release. Differs: nothing by default.
    """
    order_BT = score_BT.masked_fill(~use_BT, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    length_B1 = use_BT.sum(-1, keepdim=True)
    num_high_B1 = (p_v * length_B1.double()).ceil().long().clamp(min=1)
    num_low_B1 = length_B1 - num_high_B1
    dtype = score_BT.dtype
    high_B1 = torch.where(num_low_B1 > 0, lam, 1.0).to(dtype) / num_high_B1
    low_B1 = (1 - lam) / num_low_B1.clamp(min=1).to(dtype)
    split_BT = torch.where(order_BT < num_high_B1, high_B1, low_B1)
    if uniform_without_score:
        has_score_B1 = (score_BT.masked_fill(~use_BT, 0) != 0).any(-1, keepdim=True)
        split_BT = torch.where(has_score_B1, split_BT, 1 / length_B1.clamp(min=1).to(dtype))
    return split_BT.masked_fill(~use_BT, 0)


def from_both_views(full: str, degraded: str) -> Step:
    """No direction: opens the tokens that both views scored."""

    def fn(batch: RolloutBatch) -> Signal:
        known_BT = batch.view(full).valid_BT & batch.view(degraded).valid_BT
        return Signal(torch.zeros(known_BT.shape, dtype=batch.dtype, device=known_BT.device), known_BT)

    return signal("known", fn, needs=[f"scores.{full}", f"scores.{degraded}"])


def refuse_empty() -> Step:
    """Refuses a batch with an empty response, as the authors' code does; it changes nothing."""

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        empty_B = ~batch.mask_BT.any(-1)
        if empty_B.any():
            raise HybridError(
                f"response {int(empty_B.nonzero()[0])} has no token, so it has no view gap; "
                "set drop_empty: true to leave such responses out"
            )
        return close_gate(credit, batch, "not_empty", batch.mask_BT), state

    return Step("not_empty", Phase.GATE, Phase.GATE, dict, apply)


def weight_by_view_gap(
    full: str, degraded: str, *, tau: float, p_v: float, lam: float, uniform_without_score: bool = False
) -> Step:
    """w[k] * lam / |V| or w[k] * (1 - lam) / |L|: sums to 1 over the tokens of each prompt.

    A response without a scored token (empty, or its teacher failed) takes no part, and its siblings share the weight.
    """

    def fn(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        use_BT = credit.gate_BT
        score_BT = view_advantage(batch.view(full).logprob_BT, batch.view(degraded).logprob_BT, use_BT)
        mean_B = score_BT.sum(-1) / use_BT.sum(-1).clamp(min=1)
        share_B = sibling_softmax(mean_B, batch.group_B, use_BT.any(-1), tau=tau, eps=SIGMA_EPS)
        split_BT = rank_split(score_BT, use_BT, p_v=p_v, lam=lam, uniform_without_score=uniform_without_score)
        return share_B[:, None] * split_BT

    return weight("view_gap", fn, needs=[f"scores.{full}", f"scores.{degraded}"])
