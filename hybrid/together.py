"""What the processes of a run do together; with one process, nothing but the work itself.

All processes must come to each of these calls, in the same order.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from hybrid.errors import HybridError

Value = TypeVar("Value")

GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""How gloo and NCCL call a process that has ended."""


def num_processes() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is; 0 writes what a run writes once."""
    return distributed.get_rank() if num_processes() > 1 else 0


def from_main(make: Callable[[], Value]) -> Value:
    """What `make` returns in the process of rank 0, in all of them.

    Raises:
      ValueError: `make` raised it; the other processes exit with code 2 and leave the message to rank 0.
    """
    if num_processes() == 1:
        return make()
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = make()
        except ValueError as error:
            distributed.broadcast_object_list([None, str(error)], src=0)
            raise
    distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        sys.exit(2)
    return box[0]


def largest(value: int) -> int:
    """The largest of the processes' values."""
    if num_processes() == 1:
        return value
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(value, device=device)
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    return int(tensor)


def from_all(value: Value) -> list[Value]:
    """The values of all processes, in the order of their ranks."""
    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    distributed.all_gather_object(values, value)
    return values


@contextmanager
def loss_told() -> Iterator[None]:
    """Says in one line that another process of the run is gone, which has told its own reason.

    Raises:
      HybridError: a process that this one exchanges values with has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if num_processes() == 1 or not any(words in str(error) for words in GONE):
            raise
        raise HybridError(
            f"process {rank()} ends because another process of the run has ended; that one says why, or the launcher"
        ) from error


def wait_for_all() -> None:
    """Returns when every process has come here."""
    if num_processes() > 1:
        distributed.barrier()
