"""SIPO's analytic arm: the reward's advantage, and beside it a divergence from the student under the right answer.

Differs from the authors' code: each of the two terms has its own denominator, counted over the whole batch.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig, ViewSpec
from hybrid.methods.sipo import ContrastContext
from hybrid.objective.contrast import RewardAdvantage, from_reward_advantage
from hybrid.objective.losses import Divergence, PolicyLoss
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.signals import from_teacher_known
from hybrid.objective.step import chain


class SipoAnalytic(MethodConfig):
    """GRPO without a deviation, plus a divergence from a running average of the student that sees the answer."""

    formula: ClassVar[str] = (
        "L = L_pg(R[i] - mean_g R) + beta * mean over tokens with a context of D_alpha, q = p(. | right), top-k + tail;"
        " alpha 0: KL(q || p);  1: KL(p || q);  between: alpha KL(q || m) + (1 - alpha) KL(p || m), "
        "m = alpha q + (1 - alpha) p"
    )
    paper: ClassVar[str] = "Self-instructing policy optimization, analytic arm of the code (arXiv 2609.36742)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "alpha": "workers/config/actor.py",
        "beta": "workers/config/actor.py",
        "top_k": "user.yaml: top 100 and a tail",
        "ema": "workers/config/actor.py, `teacher_update_rate`",
        "contrast_context": "README of Yueeeeeeee/SIPO",
        "clip_low": "user.yaml",
        "clip_high": "user.yaml",
        "dual_clip": "core_algos.py",
    }

    name: Literal["sipo_analytic"] = "sipo_analytic"
    alpha: float = Field(
        default=0.0, ge=0, le=1, description="0 is the forward KL, 1 the reverse KL, between a Jensen-Shannon."
    )
    beta: float = Field(default=1.0, ge=0, description="Weight of the divergence.")
    top_k: int = Field(
        default=100, ge=0, description="Size of the student's support, with a tail bucket; 0 is the vocabulary."
    )
    ema: float = Field(
        default=0.05, gt=0, le=1, description="Share of the student that enters the teacher at each update."
    )
    contrast_context: ContrastContext = Field(default="answer", description="What the right context holds; see sipo.")
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.28, ge=0, description="How far above 1 the ratio may count.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages.")

    @override
    def build(self) -> Objective:
        reward = objective(
            name=self.name,
            credit=chain(from_reward_advantage(RewardAdvantage())),
            loss=PolicyLoss(self.clip_low, self.clip_high, self.dual_clip),
            reduction=token_mean(),
        )
        divergence = objective(
            name=self.name, credit=chain(from_teacher_known(view="right")), loss=self.loss(), reduction=token_mean()
        )
        return mix((1.0, reward), (self.beta, divergence))

    def loss(self) -> Divergence:
        """The divergence that alpha names."""
        kind = "forward_kl" if self.alpha == 0 else "reverse_kl" if self.alpha == 1 else "jsd"
        support = "student" if self.top_k else "full"
        return Divergence(kind, support, self.top_k or 64, self.alpha, view="right")

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        options = {"contrast_context": self.contrast_context, "sync": "ema", "decay": 1 - self.ema}
        return {"right": ViewSpec("self", "right", options)}
