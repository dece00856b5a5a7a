"""An SDPO-style mix: GRPO and self-distillation from the student under a privileged context, weighted 1 - w and w.

Differs from the paper: the sampled token instead of the top-k logits (TRL's `sampled_token` form), for it needs one
log-prob of the self-teacher; and two losses are mixed, as TRL does, where the paper blends two advantages. Rows whose
context could not be built (no right sibling, no feedback) have no score and leave the distillation term and its
denominator.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod, ViewSpec
from hybrid.objective.groups import Scale
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import response_mean, token_mean
from hybrid.objective.schedules import Share, at
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import chain

SELF_DECAY = 0.95
"""Of the self-teacher's running mean: rate 0.05 (TRL 1.16's SDPO)."""


class Sdpo(ClippedMethod):
    """(1 - w) GRPO + w self-distillation on the sampled tokens."""

    formula: ClassVar[str] = (
        "L = (1 - w) L_grpo + w L_self,  L_self: A[i,t] = log p(y | right context) - log pS(y), mean over responses"
    )
    paper: ClassVar[str] = "Reinforcement learning via self-distillation, SDPO (arXiv 2601.20802)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "w": "the paper's blend with GRPO, lambda 0.9, quoted in arXiv 2604.02288; TRL 1.16's SDPO has 1",
        "view": "arXiv 2601.20802: the student with a right answer or feedback in its prompt",
        "ratio_clip": "ours; none there",
        "scale": "TRL 1.16",
        "eps": "TRL 1.16",
        "clip_low": "TRL 1.16",
        "clip_high": "TRL 1.16",
    }

    name: Literal["sdpo"] = "sdpo"
    w: Share = Field(default=0.1, description="Weight of self-distillation, in [0, 1]; a number or a schedule.")
    view: Literal["right", "teacher"] = Field(default="right", description="Whose scores the self-teacher's are.")
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on the gap in nats.")
    scale: Scale = Field(
        default="group", description="Standard deviation to divide by: of the group, of the batch, or none."
    )
    eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")

    @override
    def build(self) -> Objective:
        loss = self.policy_loss()
        reward = chain(from_group_advantage(scale=self.scale, eps=self.eps))
        teacher = chain(from_teacher_gap(view=self.view, clip=self.ratio_clip))
        return mix(
            (
                lambda step: 1 - at(self.w, step),
                objective(name="grpo", credit=reward, loss=loss, reduction=token_mean()),
            ),
            (self.w, objective(name="self", credit=teacher, loss=loss, reduction=response_mean())),
        )

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        if self.view == "teacher":
            return {}
        return {"right": ViewSpec("self", "sibling", {"sync": "ema", "decay": SELF_DECAY})}
