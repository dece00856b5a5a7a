"""A constant advantage: the control that knows neither reward nor teacher.

One paper (arXiv 2608.31046) reports that on-policy distillation gains mostly by pushing down unlikely tokens, and
that a constant negative advantage did as well. A hybrid that does not beat this preset has shown nothing.

Differs from the paper: its value was not found; ours is about the mean gap of a student that is near its teacher.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.estimators import from_constant
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.schedules import Number
from hybrid.objective.step import chain


class Constant(ClippedMethod):
    """Every sampled token is pushed the same way."""

    formula: ClassVar[str] = "A[i,t] = value"
    paper: ClassVar[str] = "a control named in arXiv 2608.31046"
    sources: ClassVar[Mapping[str, str]] = {
        "value": "RECONSTRUCTED: the paper says constant and negative",
        "clip_low": "PPO's 0.2",
        "clip_high": "PPO's 0.2",
    }

    name: Literal["constant"] = "constant"
    value: Number = Field(default=-0.1, description="The advantage, in nats; a number or a schedule.")

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_constant(self.value)),
            loss=self.policy_loss(),
            reduction=token_mean(),
        )
