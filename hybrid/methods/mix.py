"""A weighted sum of any methods: what makes a hybrid.

Each part keeps its own credit, mask, denominator and state, so that adding a part never changes the size of another's
step.

No paper: ours.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.methods.constant import Constant
from hybrid.methods.dapo import Dapo
from hybrid.methods.dr_grpo import DrGrpo
from hybrid.methods.exopd import ExOpd
from hybrid.methods.grpo import Grpo
from hybrid.methods.grpo_opd import GrpoOpd
from hybrid.methods.gspo import Gspo
from hybrid.methods.kat import Kat
from hybrid.methods.kdrl import Kdrl
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.r2opd import R2Opd
from hybrid.methods.random_cut import RandomCut
from hybrid.methods.reinforce_pp import ReinforcePp
from hybrid.methods.rloo import Rloo
from hybrid.methods.rstg import Rstg
from hybrid.methods.sdpo import Sdpo
from hybrid.methods.sft import Sft
from hybrid.methods.shaping import Shaping
from hybrid.methods.sipo import Sipo
from hybrid.methods.sipo_analytic import SipoAnalytic
from hybrid.methods.va_opd import VaOpd
from hybrid.objective.objective import Objective, mix
from hybrid.objective.schedules import Number

Single = Annotated[
    Constant
    | Dapo
    | DrGrpo
    | ExOpd
    | Grpd
    | Grpo
    | GrpoOpd
    | Gspo
    | Kat
    | Kdrl
    | Opd
    | Opdvr
    | R2Opd
    | RandomCut
    | ReinforcePp
    | Rloo
    | Rstg
    | Sdpo
    | Sft
    | Shaping
    | Sipo
    | SipoAnalytic
    | VaOpd,
    Field(discriminator="name"),
]
"""Every method that is not a mixture. A new one is a new file and its name here."""


class Part(BaseModel):
    """One method of a mixture and its weight, which may be a schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weight: Number = Field(default=1.0, description="Factor of the method's loss; a number or a schedule.")
    method: Single = Field(description="The method and its settings.")


class Mix(MethodConfig):
    """Adds the losses of several methods, each with its own weight, mask, denominator and state."""

    formula: ClassVar[str] = "L = sum_j weight_j(k) * L_j"
    paper: ClassVar[str] = "ours"

    sources: ClassVar[Mapping[str, str]] = {"parts": "ours"}

    name: Literal["mix"] = "mix"
    parts: tuple[Part, ...] = Field(min_length=1, description="The methods and their weights.")

    @property
    def smallest_group(self) -> int:
        """The largest `min_generations` of its parts."""
        return max(part.method.min_generations for part in self.parts)

    @override
    def build(self) -> Objective:
        return mix(*((part.weight, part.method.build()) for part in self.parts))
