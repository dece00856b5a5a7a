"""Visual-advantage on-policy distillation: full reverse KL, weighted to what only the full view of the task can tell.

Differs from the paper: nothing in the mathematics. Ours beside it: an empty response is left out instead of refused, a
response without any view gap may be weighted evenly, and the two views may be any pair of contexts of the teacher, e.g.
a document and its blanked copy (RECONSTRUCTED: our generalisation).
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import MethodConfig, ViewSpec
from hybrid.objective.losses import Divergence
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import prompt_mean
from hybrid.objective.step import chain
from hybrid.objective.view_gap import from_both_views, refuse_empty, weight_by_view_gap


class VaOpd(MethodConfig):
    """Distils most where the teacher's opinion of a token hangs on the full view."""

    formula: ClassVar[str] = (
        "a[k,t] = max(0, log pT(y | full) - log pT(y | degraded));  w = softmax over siblings of z(mean a) / tau;  "
        "c = w[k] lam / |V| on the ceil(p_v T) tokens of largest a, w[k] (1 - lam) / |L| on the rest;  "
        "L = mean over prompts of sum c * KL(pS || pT(. | full))"
    )
    paper: ClassVar[str] = "Visual-advantage on-policy distillation (arXiv 2605.21924)"
    sources: ClassVar[Mapping[str, str]] = {
        "tau": "configs/va_opd.yaml of handsome-rich/VA-OPD",
        "p_v": "configs/va_opd.yaml",
        "lam": "configs/va_opd.yaml",
        "temperature": "docs/reproduction.md: 1 on both sides, whatever the sampling temperature",
        "degraded_ratio": "configs/va_opd.yaml, images.py",
        "drop_empty": "ours; the authors' code refuses an empty response",
        "uniform_without_gap": "ours, off",
        "full": "RECONSTRUCTED, our generalisation; the paper's is the original image",
        "degraded": "RECONSTRUCTED, our generalisation; the paper's is the pixelated image",
    }

    name: Literal["va_opd"] = "va_opd"
    tau: float = Field(default=1.0, gt=0, description="Temperature of the softmax over siblings.")
    p_v: float = Field(default=0.2, gt=0, le=1, description="Share of a response's tokens that count as high.")
    lam: float = Field(default=0.5, ge=0, le=1, description="Mass of the high tokens.")
    temperature: float = Field(default=1.0, gt=0, description="At which student and teacher are compared.")
    degraded_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Side of the shrunken image, as a share; it is blown up again to the old size.",
    )
    drop_empty: bool = Field(
        default=True, description="Leaves empty responses to their siblings; off, they are an error."
    )
    uniform_without_gap: bool = Field(
        default=False, description="A response without any view gap weighs its tokens evenly."
    )
    full: str = Field(
        default="teacher",
        min_length=1,
        description="View whose distribution is learned and whose scores are the full ones; a name other than teacher "
        "is a context of the teacher (RECONSTRUCTED).",
    )
    degraded: str = Field(
        default="degraded",
        min_length=1,
        description="View that lacks the detail; its name is a context of the teacher (RECONSTRUCTED).",
    )

    @model_validator(mode="after")
    def _refuse_one_view(self) -> Self:
        if self.full == self.degraded:
            raise ValueError(f"full and degraded are both {self.full!r}, so no token would have a view gap")
        return self

    @override
    def build(self) -> Objective:
        weight = weight_by_view_gap(
            self.full,
            self.degraded,
            tau=self.tau,
            p_v=self.p_v,
            lam=self.lam,
            uniform_without_score=self.uniform_without_gap,
        )
        checks = () if self.drop_empty else (refuse_empty(),)
        return objective(
            name=self.name,
            credit=chain(from_both_views(self.full, self.degraded), *checks, weight),
            loss=Divergence("reverse_kl", temperature=self.temperature, view=self.full),
            reduction=prompt_mean(),
        )

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        degraded = ViewSpec("teacher", self.degraded, {"ratio": self.degraded_ratio})
        if self.full == "teacher":
            return {self.degraded: degraded}
        return {self.full: ViewSpec("teacher", self.full), self.degraded: degraded}
