"""Reductions: what share of the loss each token carries. They see the whole generation batch, never a micro-batch.

A reduction returns share_BT, so that the loss is `sum_bt share[b, t] * loss[b, t]` and micro-batches, ranks and
accumulation steps simply add up. Each term of an objective has its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from hybrid.errors import MissingMeasurement
from hybrid.objective.groups import group_index
from hybrid.types import Credit, RolloutBatch


class Reduction(NamedTuple):
    """A named reduction; `share(credit, batch)` is 0 on padding."""

    name: str
    share: Callable[[Credit, RolloutBatch], Float[Tensor, "B T"]]


def counted(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
    """The tokens that a term's denominator counts: its own known tokens, gated or not; never a failed teacher row."""
    return batch.mask_BT & credit.known_BT


def spread(mask_BT: Bool[Tensor, "B T"], denominator: Num[Tensor, "*d"], dtype: torch.dtype) -> Float[Tensor, "B T"]:
    """1 / denominator on the mask; 0 elsewhere and where the denominator is 0."""
    return mask_BT.to(dtype) / denominator.to(dtype).clamp(min=1)


def lost_rows(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, " B"]:
    """Responses that have tokens of which the term knows none: their teacher failed."""
    return batch.mask_BT.any(-1) & ~counted(credit, batch).any(-1)


def carrying_rows(
    branch: str | None, branches: tuple[str, ...], credit: Credit, batch: RolloutBatch
) -> Bool[Tensor, " B"]:
    """The first row of each prompt that owns a demonstration, among the rows of a route's branch or of all of them."""
    owns_B = batch.texts().mask_BU.any(-1)
    if branch is not None:
        owns_B = owns_B & (credit.branch_B == branches.index(branch))
    elif branches:
        owns_B = owns_B & (credit.branch_B >= 0)
    index_B, num_groups = group_index(batch.group_B)
    order_B = torch.arange(len(index_B), device=index_B.device).masked_fill(~owns_B, len(index_B))
    first_G = order_B.new_full((num_groups,), len(index_B)).scatter_reduce(0, index_B, order_B, "amin")
    return owns_B & (order_B == first_G[index_B])


def token_mean() -> Reduction:
    """Sum over tokens / number of tokens that the term knows, whether a gate is open or not."""

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        mask_BT = counted(credit, batch)
        return spread(mask_BT, mask_BT.sum(), batch.dtype)

    return Reduction("token_mean", share)


def token_mean_with_texts(branch: str, branches: tuple[str, ...]) -> Reduction:
    """`token_mean` whose denominator also counts the demonstrations that one branch of a route imitates."""

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        text_BU = batch.texts().mask_BU & carrying_rows(branch, branches, credit, batch)[:, None]
        mask_BT = counted(credit, batch)
        return spread(mask_BT, mask_BT.sum() + text_BU.sum(), batch.dtype)

    return Reduction("token_mean_with_texts", share)


def kept_token_mean() -> Reduction:
    """Sum over tokens / number of tokens that the gates left open."""

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        mask_BT = credit.gate_BT & batch.mask_BT
        return spread(mask_BT, mask_BT.sum(), batch.dtype)

    return Reduction("kept_token_mean", share)


def token_sum() -> Reduction:
    """Sum over tokens / number of responses whose teacher did not fail (the loss as the OPDVR paper writes it)."""
    return Reduction(
        "token_sum",
        lambda credit, batch: spread(counted(credit, batch), (~lost_rows(credit, batch)).sum(), batch.dtype),
    )


def response_mean(*, kept: bool = False) -> Reduction:
    """Mean over responses of the mean over their tokens; over their open tokens with `kept`.

    Every response counts, an empty one too; a response whose teacher failed does not.
    """

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        mask_BT = credit.gate_BT & batch.mask_BT if kept else counted(credit, batch)
        length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        return spread(mask_BT, length_B1 * (~lost_rows(credit, batch)).sum().clamp(min=1), batch.dtype)

    return Reduction("kept_response_mean" if kept else "response_mean", share)


def prompt_mean() -> Reduction:
    """Sum over tokens / number of prompts; for weights that already sum to 1 in each prompt.

    A prompt whose responses were all lost to a failed teacher does not count.
    """

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        num_prompts = len(batch.group_B[~lost_rows(credit, batch)].unique())
        return spread(counted(credit, batch), torch.tensor(num_prompts), batch.dtype)

    return Reduction("prompt_mean", share)


def length_constant(max_length: int | None = None) -> Reduction:
    """Sum over tokens / (number of responses * a constant length), the unbiased reduction of Dr. GRPO (2503.20783).

    Args:
      max_length: the constant; None takes the run's limit on response tokens.
    """

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        length = max_length or batch.max_length
        if length is None:
            raise MissingMeasurement(
                "the reduction length_constant needs the limit on response tokens; set max_length in the method"
            )
        return spread(counted(credit, batch), torch.tensor(len(batch.group_B) * length), batch.dtype)

    return Reduction("length_constant", share)
