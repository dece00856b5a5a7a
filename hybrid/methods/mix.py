"""A weighted sum of any methods: what makes a hybrid.

Each part keeps its own credit, mask, denominator and state, so that adding a part never changes the size of another's
step.

No paper: ours.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import override

from hybrid.errors import ConfigError
from hybrid.methods.base import MethodConfig, ViewSpec
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
from hybrid.objective.groups import all_right, all_wrong, mixed
from hybrid.objective.objective import Objective, mix
from hybrid.objective.schedules import Weight, ends
from hybrid.objective.step import only

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

    weight: Weight = Field(default=1.0, description="Factor of the method's loss; a number or a schedule.")
    method: Single = Field(description="The method and its settings.")
    rows: Literal["all", "all_wrong", "mixed", "all_right"] = Field(
        default="all", description="Which groups the method trains; the others count in its denominator with credit 0."
    )

    def build(self) -> Objective:
        """The method's objective, on its rows."""
        built = self.method.build()
        if self.rows == "all":
            return built
        return Objective(tuple(replace(term, credit=only(ROWS[self.rows], term.credit)) for term in built.terms))

    @property
    def wanted_views(self) -> Mapping[str, ViewSpec]:
        """How each view that the method reads is made; the plain teacher where it does not say."""
        names = {need.split(".")[1] for need in self.method.build().needs if need.startswith("scores.")}
        return {name: ViewSpec() for name in sorted(names - {"student"})} | dict(self.method.views)


ROWS = {row_test.name: row_test for row_test in (all_wrong(), mixed(), all_right())}
"""The tests that `rows` names."""


class Mix(MethodConfig):
    """Adds the losses of several methods, each with its own weight, mask, denominator and state."""

    formula: ClassVar[str] = "L = sum_j weight_j(k) * L_j"
    paper: ClassVar[str] = "ours"

    sources: ClassVar[Mapping[str, str]] = {"parts": "ours"}

    name: Literal["mix"] = "mix"
    parts: tuple[Part, ...] = Field(min_length=1, description="The methods and their weights.")

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        stateful = [part.method.name for part in self.parts if part.build().init()]
        if twice := [name for name in stateful if stateful.count(name) > 1]:
            raise ValueError(f"{twice[0]} stands in two parts and keeps a state, which only one part can; take one out")
        if all(ends(part.weight) == (0, 0) for part in self.parts):
            raise ValueError("every weight is 0, so nothing would be trained; give some part a weight above 0")
        return self

    @property
    def smallest_group(self) -> int:
        """The largest `min_generations` of its parts."""
        return max(part.method.min_generations for part in self.parts)

    @override
    def build(self) -> Objective:
        return mix(*((part.weight, part.build()) for part in self.parts))

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        together: dict[str, ViewSpec] = {}
        for part in self.parts:
            for name, spec in part.wanted_views.items():
                together[name] = joined(name, together.get(name, spec), spec)
        return {name: spec for name, spec in together.items() if spec != ViewSpec()}

    @model_validator(mode="after")
    def _trains_whole_responses(self) -> Self:
        for part in self.parts:
            if part.method.online_stop is not None and part.method.online_stop.required:
                raise ConfigError(
                    f"{part.method.name} with online: true ends responses that the other parts want whole; "
                    "in a mixture it masks them (online: auto)"
                )
        return self

    @model_validator(mode="after")
    def _has_one_making_of_each_view(self) -> Self:
        assert self.views is not None  # raises where two parts disagree
        return self


def joined(name: str, one: ViewSpec, other: ViewSpec) -> ViewSpec:
    """One making of a view for two parts: the same, but scored on all rows where either asks for all.

    Raises:
      ConfigError: the parts want it made differently.
    """
    if one == other:
        return one
    one, other = (
        replace(spec, options={k: v for k, v in spec.options.items() if k not in ("rows", "fail_thr")})
        for spec in (one, other)
    )
    if one != other:
        settings = [{"context": spec.context, **spec.options} for spec in (one, other)]
        differ = [key for key in {**settings[0], **settings[1]} if settings[0].get(key) != settings[1].get(key)]
        told = [", ".join(f"{key} {setting.get(key, 'none')}" for key in differ) for setting in settings]
        raise ConfigError(
            f"two parts want scores.{name} made differently ({told[0]}; {told[1]}); give them the same settings of it"
        )
    return one
