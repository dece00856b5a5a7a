"""ExOPD: distils towards a point beyond the teacher, as seen from a reference model.

Differs from the paper: nothing known; `positive_only` is the gate of MOPD (arXiv 2609.23377), whose expression is ours.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod, ViewSpec
from hybrid.objective.estimators import from_extrapolated_gap
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.schedules import Number
from hybrid.objective.step import chain

NEVER = 10**9
"""Updates between two copies of the student: the reference stays what the student was at the start."""


class ExOpd(ClippedMethod):
    """On-policy distillation with the teacher's change over a reference extrapolated by lam."""

    formula: ClassVar[str] = "A[i,t] = -(s - r - lam (t - r)),  s, t, r = log p of student, teacher, reference"
    paper: ClassVar[str] = "G-OPD / ExOPD (arXiv 2602.12125)"
    sources: ClassVar[Mapping[str, str]] = {
        "lam": "RUCBM/G-OPD: 1.25 is ExOPD",
        "positive_only": "arXiv 2609.23377, expression ours",
        "ratio_clip": "arXiv 2609.23377 clips at 5; G-OPD does not",
        "clip_low": "PPO's 0.2",
        "clip_high": "PPO's 0.2",
    }

    name: Literal["exopd"] = "exopd"
    lam: Number = Field(
        default=1.25, description="1 is plain distillation, above 1 extrapolates; a number or a schedule."
    )
    positive_only: bool = Field(
        default=False, description="Extrapolate only where the teacher is likelier than the reference."
    )
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |A| in nats.")

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_extrapolated_gap(lam=self.lam, positive_only=self.positive_only, clip=self.ratio_clip)),
            loss=self.policy_loss(),
            reduction=token_mean(),
        )

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        return {"reference": ViewSpec("self", None, {"sync": "snapshot", "every": NEVER})}
