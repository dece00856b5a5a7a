"""DAPO: clip-higher, dynamic sampling, token-level loss and soft overlong punishment.

Differs from the paper: dynamic sampling there asks for more prompts until the batch is full; here groups of equal
rewards leave the batch, numerator and denominator, so a step may be smaller. The overlong rule waits for `max_length`,
because its ramp means nothing without the run's limit (the paper has 20480, with a buffer of 4096).
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.estimators import overlong_reward
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.row_gates import drop_truncated
from hybrid.objective.signals import PLAIN, from_group_advantage
from hybrid.objective.step import chain


class Dapo(ClippedMethod):
    """GRPO on groups that differ, with more room to raise a token than to lower it and a price on length."""

    formula: ClassVar[str] = (
        "R'[i] = R[i] + penalty * max(-1, min(0, (max_length - overlong_buffer - |o[i]|) / overlong_buffer));  "
        "A[i,t] = (R'[i] - mean_g R') / (std_g R' + eps);  loss = token mean of the clipped surrogate"
    )
    paper: ClassVar[str] = "DAPO (arXiv 2503.14476)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "clip_low": "arXiv 2503.14476, section 4.1",
        "clip_high": "arXiv 2503.14476, section 4.1",
        "eps": "TRL 1.16 (the paper adds nothing)",
        "max_length": "arXiv 2503.14476, Eq. 13: L_max, 20480 there",
        "overlong_buffer": "arXiv 2503.14476, Eq. 13: L_cache",
        "overlong_penalty": "arXiv 2503.14476, Eq. 13",
        "drop_truncated": "arXiv 2503.14476, section 3.4, overlong filtering",
        "dynamic_sampling": "arXiv 2503.14476, Eq. 11",
    }

    name: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0, description="How far above 1 the ratio may count.")
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")
    max_length: int | None = Field(
        default=None, ge=1, description="Limit of the overlong rule; null leaves the rule out."
    )
    overlong_buffer: int = Field(default=4096, ge=1, description="Length of the ramp before max_length.")
    overlong_penalty: float = Field(default=1.0, ge=0, description="Size of the full punishment.")
    drop_truncated: bool = Field(
        default=False,
        description="Responses at the length limit leave the batch and its denominator (overlong filtering).",
    )
    dynamic_sampling: bool = Field(
        default=True, description="Groups of equal rewards leave the batch and its denominator."
    )

    @model_validator(mode="after")
    def _refuse_a_ramp_longer_than_the_limit(self) -> Self:
        if self.max_length is not None and self.overlong_buffer > self.max_length:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) must not exceed max_length ({self.max_length}); "
                "the paper's share is a fifth"
            )
        return self

    @override
    def build(self) -> Objective:
        reward = PLAIN
        if self.max_length is not None:
            reward = overlong_reward(
                max_length=self.max_length, buffer=self.overlong_buffer, penalty=self.overlong_penalty
            )
        credit = from_group_advantage(scale="group", eps=self.eps, reward=reward, drop_uniform=self.dynamic_sampling)
        return objective(
            name=self.name,
            credit=chain(credit, drop_truncated()) if self.drop_truncated else chain(credit),
            loss=self.policy_loss(),
            reduction=token_mean(),
        )
