"""A weighted sum of any methods: what makes a hybrid."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from hybrid.methods.base import MethodConfig
from hybrid.methods.grpo import Grpo
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.objective.objective import Objective, mix
from hybrid.objective.schedules import Number

Single = Annotated[Grpo | Grpd | Opd | Opdvr, Field(discriminator="name")]
"""Every method that is not a mixture. A new one is a new file and its name here."""


class Part(BaseModel):
    """One method of a mixture and its weight, which may be a schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weight: Number = Field(1.0, description="Factor of the method's loss; a number or a schedule.")
    method: Single = Field(description="The method and its settings.")


class Mix(MethodConfig):
    """Adds the losses of several methods, each with its own weight, mask, denominator and state."""

    formula: ClassVar[str] = "L = sum_j weight_j(k) * L_j"
    paper: ClassVar[str] = "ours"

    name: Literal["mix"] = "mix"
    parts: tuple[Part, ...] = Field(min_length=1, description="The methods and their weights.")

    @property
    def smallest_group(self) -> int:
        """The largest `min_generations` of its parts."""
        return max(part.method.min_generations for part in self.parts)

    def build(self) -> Objective:
        return mix(*((part.weight, part.method.build()) for part in self.parts))
