"""Gates on whole responses."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from hybrid.objective.gates import outcome
from hybrid.objective.groups import all_wrong
from hybrid.objective.step import Step, gate
from hybrid.types import Credit, RolloutBatch, State


def untruncated(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
    """True on the tokens of responses that ended by themselves."""
    return ~batch.need("truncated")[:, None].expand(batch.mask_BT.shape)


def keep_untruncated() -> Step:
    """Closes the gate on responses that hit the length limit; they stay in the denominator, as any gated token does."""
    return gate("untruncated", untruncated, needs=["truncated"])


def drop_truncated() -> Step:
    """Leaves out responses that hit the length limit, from numerator and denominator (overlong filtering of DAPO)."""
    closing = keep_untruncated()

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        credit, state = closing.apply(credit, batch, state)
        return replace(credit, known_BT=credit.known_BT & untruncated(credit, batch)), state

    return closing._replace(name="drop_truncated", apply=apply)


def keep_wrong(level: Literal["wrong_responses", "all_wrong_groups"], *, thr: float = 0.0) -> Step:
    """Keeps responses known to be wrong, or those of groups in which every scored response is (KDRL's masks)."""

    def fn(credit: Credit, batch: RolloutBatch) -> Bool[Tensor, "B T"]:
        groups = all_wrong(fail_thr=thr, spread=torch.inf)
        keep_B = outcome(batch, thr) < 0 if level == "wrong_responses" else groups.test(batch)
        return keep_B[:, None].expand(batch.mask_BT.shape)

    return gate("wrong", fn, needs=["reward"])
