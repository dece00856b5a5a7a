"""Weights: how strongly each kept token counts; never negative."""

import torch
from jaxtyping import Float
from torch import Tensor

from hybrid.objective.gates import outcome
from hybrid.objective.groups import Scale, group_advantage
from hybrid.objective import schedules
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
