"""KDRL: GRPO plus a k2 loss towards the teacher whose weight is annealed.

Differs from the paper: each term has its own denominator (the same number when the teacher scored every token). The
k2 loss has no importance ratio, so on a batch that is used more than once its gradient is that of the old samples.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.groups import Scale
from hybrid.objective.losses import SampledDivergence
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.row_gates import keep_wrong
from hybrid.objective.schedules import Schedule, Weight
from hybrid.objective.signals import from_group_advantage, from_teacher_known
from hybrid.objective.step import chain


class Kdrl(ClippedMethod):
    """GRPO minus beta times the k2 estimate of the reverse KL to the teacher."""

    formula: ClassVar[str] = "L = L_grpo + beta(k) * token mean of (log pS - log pT)^2 / 2"
    paper: ClassVar[str] = "KDRL (arXiv 2506.02208)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "beta": "arXiv 2506.02208: max(1e-3, 5e-3 - 5e-5 k), which is linear over 80 updates",
        "mask": "arXiv 2506.02208, reward-guided masking, response level and group level",
        "thr": "ours: a verifier's 0/1 reward",
        "scale": "TRL 1.16",
        "eps": "TRL 1.16",
        "clip_low": "TRL 1.16",
        "clip_high": "TRL 1.16",
    }

    name: Literal["kdrl"] = "kdrl"
    beta: Weight = Field(
        default=Schedule(start=5e-3, end=1e-3, steps=80, shape="linear"),
        description="Weight of the k2 loss; a number or a schedule.",
    )
    mask: Literal["none", "wrong_responses", "all_wrong_groups"] = Field(
        default="none",
        description="Which responses the k2 loss sees: all, wrong ones, or those of groups without a right one.",
    )
    thr: float = Field(default=0.0, description="A reward above it is a right answer (for mask).")
    scale: Scale = Field(
        default="group", description="Standard deviation to divide by: of the group, of the batch, or none."
    )
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")

    @override
    def build(self) -> Objective:
        reward = chain(from_group_advantage(scale=self.scale, eps=self.eps))
        known = from_teacher_known()
        teacher = chain(known) if self.mask == "none" else chain(known, keep_wrong(self.mask, thr=self.thr))
        return mix(
            (1.0, objective(name="grpo", credit=reward, loss=self.policy_loss(), reduction=token_mean())),
            (self.beta, objective(name="kd", credit=teacher, loss=SampledDivergence("k2"), reduction=token_mean())),
        )
