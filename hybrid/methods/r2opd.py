"""Reward-aligned reweighting of on-policy distillation: OPDVR's gate made soft, with the total push kept.

Differs from the paper: nothing known. The formula was read at one remove, in a note on the paper. Ours: an unscored
response has z = 0, and so its plain gap.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.gates import Truncated
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.row_gates import drop_truncated
from hybrid.objective.signals import from_teacher_gap
from hybrid.objective.step import chain
from hybrid.objective.weights import weight_by_outcome_agreement


class R2Opd(MethodConfig):
    """Re-weights the teacher gap towards tokens that the outcome agrees with; a response's summed |A| stays sum |r|."""

    formula: ClassVar[str] = (
        "r = log pT - log pS;  g = sigmoid(beta z r / nu), nu = max(median |r|, eps);  A = (sum |r| / sum g |r|) g r"
    )
    paper: ClassVar[str] = "R2-OPD (arXiv 2609.35517)"
    sources: ClassVar[Mapping[str, str]] = {
        "beta": "paper",
        "eps": "RECONSTRUCTED: value not found",
        "thr": "as OPDVR",
        "truncated": "paper: plain distillation for truncated responses",
        "ratio_clip": "ours; none in the paper",
        "clip_low": "as OPDVR's script",
        "clip_high": "as OPDVR's script",
        "dual_clip": "as OPDVR's script",
    }

    name: Literal["r2opd"] = "r2opd"
    beta: float = Field(default=1e-3, ge=0, description="Sharpness; 0 is plain distillation, to infinity OPDVR's gate.")
    eps: float = Field(default=1e-6, gt=0, description="Smallest scale nu in nats (RECONSTRUCTED).")
    thr: float = Field(default=0.0, description="A reward above it is a right answer.")
    truncated: Truncated = Field(
        default="vanilla_opd",
        description="Responses at the length limit: plain OPD, judged as wrong ones are, or dropped.",
    )
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |r| in nats.")
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages.")

    @override
    def build(self) -> Objective:
        weight = weight_by_outcome_agreement(
            thr=self.thr, beta=self.beta, eps=self.eps, plain_truncated=self.truncated == "vanilla_opd"
        )
        gates = (drop_truncated(),) if self.truncated == "skip" else ()
        return objective(
            name=self.name,
            credit=chain(from_teacher_gap(clip=self.ratio_clip), *gates, weight),
            loss=PolicyLoss(self.clip_low, self.clip_high, self.dual_clip),
            reduction=token_mean(),
        )
