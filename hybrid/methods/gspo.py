"""GSPO: one importance ratio for a whole response, the geometric mean of its tokens' ratios.

Differs from the paper: nothing. The ratio only tells from GRPO's when a batch is used for more than one update.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import response_mean
from hybrid.objective.signals import from_group_advantage
from hybrid.objective.step import chain


class Gspo(ClippedMethod):
    """GRPO's advantage, clipped response by response."""

    formula: ClassVar[str] = (
        "A[i] = (R[i] - mean_g R) / (std_g R + eps);  s[i] = exp(mean_t (log p - log p_old));  "
        "loss = - mean_i min(s[i] A[i], clip(s[i], 1 - clip_low, 1 + clip_high) A[i])"
    )
    paper: ClassVar[str] = "Group sequence policy optimization (arXiv 2507.18071)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "clip_low": "arXiv 2507.18071 v2, section 5.1",
        "clip_high": "arXiv 2507.18071 v2, section 5.1",
        "eps": "TRL 1.16 (the paper adds nothing)",
    }

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, description="How far below 1 the response's ratio may count.")
    clip_high: float = Field(default=4e-4, ge=0, description="How far above 1 the response's ratio may count.")
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_group_advantage(scale="group", eps=self.eps)),
            loss=PolicyLoss(self.clip_low, self.clip_high, level="sequence"),
            reduction=response_mean(),
        )
