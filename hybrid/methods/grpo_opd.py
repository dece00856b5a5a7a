"""GRPO and on-policy distillation put together without a gate: the naive hybrids that gated methods compare with.

`combine: advantages` adds the teacher's gap to the reward advantage and trains one surrogate; `combine: losses` keeps
two surrogates, each with its own denominator. The gap is always added after the reward is normalised, and nothing is
whitened afterwards: a z-score of [1.3, 1.3, -0.7, -0.7] is [1, 1, -1, -1] again, and the teacher is gone.

Differs from the frameworks that do this (slime, ms-swift, verl): nothing known but the names.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.groups import Scale
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.schedules import Weight
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import chain


class GrpoOpd(ClippedMethod):
    """Reward advantage plus teacher gap, as one advantage or as two losses."""

    formula: ClassVar[str] = (
        "advantages: A[i,t] = A_group[i] + coef * (log pT - log pS);  losses: L = L_grpo + coef * L_opd"
    )
    paper: ClassVar[str] = (
        "MiMo-V2-Flash (arXiv 2601.02780) and OpenClaw-RL (arXiv 2603.10165) for the sum of advantages"
    )
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "combine": "slime, ms-swift and Tinker add advantages, verl adds losses",
        "coef": "slime's --opd-kl-coef",
        "scale": "TRL 1.16",
        "eps": "TRL 1.16",
        "ratio_clip": "ours; none there",
        "clip_low": "TRL 1.16",
        "clip_high": "TRL 1.16",
    }

    name: Literal["grpo_opd"] = "grpo_opd"
    combine: Literal["advantages", "losses"] = Field(default="advantages", description="What is added up.")
    coef: Weight = Field(default=1.0, description="Weight of the teacher's part; a number or a schedule.")
    scale: Scale = Field(
        default="group", description="Standard deviation that the reward is divided by, before the sum."
    )
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |log pT - log pS| in nats.")

    @override
    def build(self) -> Objective:
        reward = from_group_advantage(scale=self.scale, eps=self.eps)
        loss, reduction = self.policy_loss(), token_mean()
        if self.combine == "advantages":
            credit = chain(reward, from_teacher_gap(scale=self.coef, clip=self.ratio_clip))
            return objective(name=self.name, credit=credit, loss=loss, reduction=reduction)
        gap = chain(from_teacher_gap(clip=self.ratio_clip))
        return mix(
            (1.0, objective(name="grpo", credit=chain(reward), loss=loss, reduction=reduction)),
            (self.coef, objective(name="opd", credit=gap, loss=loss, reduction=reduction)),
        )
