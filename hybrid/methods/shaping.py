"""Reward shaping: the teacher's gap is a token reward, added before the advantage estimator.

    token reward:  r[i,t] = (R[i] on the last token) - coef * (log pS - log pT)

`estimator: group` compares the sums of token rewards within a group, so a response gets one advantage for all its
tokens; `return_to_go` gives a token the rewards from it on, with the task reward normalised over the group first
(ROLL's order). The rule: nothing is divided by a deviation or whitened once the teacher is in, for that would rescale
the teacher, and a constant teacher term would vanish. `scale` therefore divides the task reward alone and is refused
with `group`.

Differs from ROLL: no whitening of advantages, no reward clip, and no discount (its default discount is 1). Tokens that
the teacher did not score add nothing to a return; a response without any score is left out of `group`'s comparison.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.estimators import from_gap_to_go, shaped_return
from hybrid.objective.groups import Scale
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.schedules import Weight
from hybrid.objective.signals import from_group_advantage
from hybrid.objective.step import chain


class Shaping(ClippedMethod):
    """Task reward plus the teacher's gap as a reward, then an advantage estimator."""

    formula: ClassVar[str] = (
        "group: R'[i] = R[i] + coef * sum_t (log pT - log pS),  A[i,t] = R'[i] - mean_g R';  "
        "return_to_go: A[i,t] = A_group[i] + coef * sum_{u >= t} (log pT - log pS)"
    )
    paper: ClassVar[str] = "ROLL (arXiv 2506.06122), on-policy distillation pipeline"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "estimator": "return_to_go: ROLL; group: ours",
        "coef": "slime's --opd-kl-coef; ROLL has one per teacher",
        "scale": "ours: no division once the teacher is in",
        "ratio_clip": "ours; none there",
        "clip_low": "PPO's 0.2",
        "clip_high": "PPO's 0.2",
    }

    name: Literal["shaping"] = "shaping"
    estimator: Literal["group", "return_to_go"] = Field(
        default="group", description="What turns rewards into advantages."
    )
    coef: Weight = Field(default=1.0, description="Weight c of the teacher's part; a number or a schedule.")
    scale: Scale = Field(
        default="none", description="Deviation that the task reward is divided by (return_to_go only)."
    )
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |log pT - log pS| in nats.")

    @model_validator(mode="after")
    def _refuse_to_rescale_the_teacher(self) -> Self:
        if self.estimator == "group" and self.scale != "none":
            raise ValueError(
                "scale divides the shaped return, teacher included, so the teacher's part would change with the spread "
                "of the rewards; use scale: none, or estimator: return_to_go, which scales the task reward alone"
            )
        return self

    @override
    def build(self) -> Objective:
        if self.estimator == "group":
            credit = chain(from_group_advantage(reward=shaped_return(coef=self.coef, clip=self.ratio_clip)))
        else:
            credit = chain(from_group_advantage(scale=self.scale), from_gap_to_go(coef=self.coef, clip=self.ratio_clip))
        return objective(name=self.name, credit=credit, loss=self.policy_loss(), reduction=token_mean())
