"""Group-relative policy optimisation: reward alone, no teacher.

Differs from the paper (DeepSeekMath): the mean over all tokens of DAPO instead of a mean over responses of token
means, as TRL's default is; no KL to a reference model; the deviation is the unbiased one, and eps is added to it, as
in TRL.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.groups import Scale
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.signals import from_group_advantage
from hybrid.objective.step import chain


class Grpo(MethodConfig):
    """A response's reward against its siblings' is the advantage of each of its tokens. Defaults are TRL's."""

    formula: ClassVar[str] = "A[i,t] = (R[i] - mean_g R) / (std_g R + eps);  loss = token mean of the clipped surrogate"
    paper: ClassVar[str] = "DeepSeekMath (arXiv 2402.03300); token mean as in DAPO (arXiv 2503.14476)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "scale": "arXiv 2402.03300, section 4.1.1; TRL 1.16, scale_rewards",
        "eps": "TRL 1.16",
        "clip_low": "TRL 1.16, epsilon",
        "clip_high": "TRL 1.16, epsilon",
    }

    name: Literal["grpo"] = "grpo"
    scale: Scale = Field(
        default="group", description="Standard deviation to divide by: of the group, of the batch, or none."
    )
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation (TRL's value).")
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count.")

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_group_advantage(scale=self.scale, eps=self.eps)),
            loss=PolicyLoss(self.clip_low, self.clip_high),
            reduction=token_mean(),
        )
