"""A cut at a random place: the length-matched control for methods that stop a response early.

The place must not depend on how rows are ordered or spread over processes, and `hybrid explain` must find it again in a
record, so it is drawn from the row itself: seed, step, length and the places of its largest KLs decide. Their values do
not: the last bits of a value depend on which rows share a forward.
"""

import math
import random
import zlib

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.objective.step import Step, gate
from hybrid.types import Credit, RolloutBatch

NUM_LARGEST = 4
"""How many of the largest KLs tell one response from another."""


def random_share(fingerprint: bytes, *, seed: int, step: int, keep_share: float) -> float:
    """A share with mean `keep_share`, uniform on the widest interval in [0, 1] around it.

    Args:
      fingerprint: what tells one response from another.
      seed: of the run.
      step: updates before this batch.
      keep_share: mean share of tokens to keep, in (0, 1].
    """
    half = min(keep_share, 1 - keep_share)
    drawn = random.Random(zlib.crc32(fingerprint, zlib.crc32(f"{seed}/{step}".encode()))).random()
    return keep_share + half * (2 * drawn - 1)


def random_cut(
    reverse_kl_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    seed: int,
    step: int,
    keep_share: float,
    min_keep: int = 1,
) -> Bool[Tensor, "B T"]:
    """True on the first ceil(share * length) tokens of each response, at least `min_keep`."""
    keep_BT = torch.zeros_like(mask_BT)
    for row, (kl_T, mask_T) in enumerate(zip(reverse_kl_BT, mask_BT, strict=True)):
        used = kl_T[mask_T].to("cpu", torch.float32)
        largest = used.argsort(descending=True, stable=True)[:NUM_LARGEST]
        fingerprint = f"{len(used)}/{largest.tolist()}".encode()
        share = random_share(fingerprint, seed=seed, step=step, keep_share=keep_share)
        keep_BT[row] = mask_T.cumsum(0) <= max(min_keep, math.ceil(share * len(used)))
    return keep_BT & mask_BT


def keep_random_prefix(*, seed: int, keep_share: float, min_keep: int = 1) -> Step:
    """Keeps a random first part of each response."""

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        return random_cut(
            batch.need("kl"),
            batch.mask_BT,
            seed=seed,
            step=batch.step,
            keep_share=keep_share,
            min_keep=min_keep,
        )

    return gate("random_prefix", fn, needs=["kl"])
