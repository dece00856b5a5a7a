"""A batch of every process's rows, so that group statistics, running thresholds and denominators are global."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid.types import Demonstration, RolloutBatch, View

Record = TypeVar("Record")

GatherTensor = Callable[[Tensor], Tensor]
"""Concatenates one tensor of every process along the first axis; all have the same shape."""


def gather_batch(batch: RolloutBatch, gather: GatherTensor) -> RolloutBatch:
    """The rows of all processes in the order of their ranks, padded to the longest response of any.

    Args:
      batch: this process's rows; every process has as many.
      gather: e.g. `accelerator.gather`; the identity for one process.
    """
    width = longest(batch.mask_BT, gather)
    width_U = longest(batch.demonstration.mask_BU, gather) if batch.demonstration else 0
    return gather_record(batch, gather, width, width_U)


def longest(mask: Tensor, gather: GatherTensor) -> int:
    """The largest second axis of any process."""
    return int(gather(torch.tensor([mask.shape[1]], device=mask.device)).max())


def gather_record(record: Record, gather: GatherTensor, width: int, width_U: int) -> Record:
    """A frozen record with every tensor in it padded (second axis) and gathered (first axis)."""
    changes = {}
    for spec in fields(record):  # pyright: ignore[reportArgumentType]
        value = getattr(record, spec.name)
        if isinstance(value, Tensor):
            changes[spec.name] = gather(padded(value, width_U if spec.name.endswith("_BU") else width))
        elif isinstance(value, View | Demonstration):
            changes[spec.name] = gather_record(value, gather, width, width_U)
        elif spec.name == "views":
            changes[spec.name] = {name: gather_record(view, gather, width, width_U) for name, view in value.items()}
    return replace(record, **changes)  # pyright: ignore[reportArgumentType]


def padded(value: Tensor, width: int) -> Tensor:
    """The tensor with its second axis filled up to `width` with 0; rows without a second axis as they are."""
    if value.dim() < 2 or value.shape[1] == width:
        return value.contiguous()
    return pad(value, (0, 0) * (value.dim() - 2) + (0, width - value.shape[1])).contiguous()
