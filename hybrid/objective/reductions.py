"""Reductions: what share of the loss each token carries. They see the whole generation batch, never a micro-batch.

A reduction returns share_BT, so that the loss is `sum_bt share[b, t] * loss[b, t]` and micro-batches, ranks and
accumulation steps simply add up. Each term of an objective has its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
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


def spread(mask_BT: Bool[Tensor, "B T"], denominator: Float[Tensor, "*d"], dtype: torch.dtype) -> Float[Tensor, "B T"]:
    """1 / denominator on the mask; 0 elsewhere and where the denominator is 0."""
    return mask_BT.to(dtype) / denominator.to(dtype).clamp(min=1)


def token_mean() -> Reduction:
    """Sum over tokens / number of tokens that the term knows, whether a gate is open or not."""

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        mask_BT = counted(credit, batch)
        return spread(mask_BT, mask_BT.sum(), batch.dtype)

    return Reduction("token_mean", share)


def kept_token_mean() -> Reduction:
    """Sum over tokens / number of tokens that the gates left open."""
    return Reduction(
        "kept_token_mean",
        lambda credit, batch: spread(credit.gate_BT & batch.mask_BT, credit.gate_BT.sum(), batch.dtype),
    )


def token_sum() -> Reduction:
    """Sum over tokens / number of responses (the loss as the OPDVR paper writes it)."""
    return Reduction(
        "token_sum",
        lambda credit, batch: spread(counted(credit, batch), torch.tensor(len(batch.group_B)), batch.dtype),
    )


def response_mean(*, kept: bool = False) -> Reduction:
    """Mean over responses of the mean over their tokens; over their open tokens with `kept`.

    Every response counts, an empty one too; a response whose teacher failed does not.
    """

    def share(credit: Credit, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        mask_BT = credit.gate_BT & batch.mask_BT if kept else counted(credit, batch)
        lost_B = batch.mask_BT.any(-1) & ~counted(credit, batch).any(-1)
        length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        return spread(mask_BT, length_B1 * (~lost_B).sum().clamp(min=1), batch.dtype)

    return Reduction("kept_response_mean" if kept else "response_mean", share)


def prompt_mean() -> Reduction:
    """Sum over tokens / number of prompts; for weights that already sum to 1 in each prompt."""
    return Reduction(
        "prompt_mean",
        lambda credit, batch: spread(counted(credit, batch), torch.tensor(group_index(batch.group_B)[1]), batch.dtype),
    )


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
