"""Gates on whole responses."""

from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from hybrid.objective.gates import outcome
from hybrid.objective.groups import all_wrong
from hybrid.objective.step import Step, gate
from hybrid.types import Credit, RolloutBatch


def keep_untruncated() -> Step:
    """Drops responses that hit the length limit (overlong filtering of DAPO); they stay in the denominator."""

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        return ~batch.need("truncated")[:, None].expand(batch.mask_BT.shape)

    return gate("untruncated", fn, needs=["truncated"])


def keep_wrong(level: Literal["wrong_responses", "all_wrong_groups"], *, thr: float = 0.0) -> Step:
    """Keeps responses known to be wrong, or those of groups in which every scored response is (KDRL's masks)."""

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        groups = all_wrong(fail_thr=thr, spread=torch.inf)
        keep_B = outcome(batch, thr) < 0 if level == "wrong_responses" else groups.test(batch)
        return keep_B[:, None].expand(batch.mask_BT.shape)

    return gate("wrong", fn, needs=["reward"])
