"""Every method, by name. A new one is a new file and its name in `mix.Single`, and here for `import`."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from hybrid.errors import ConfigError
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
from hybrid.methods.mix import Mix, Part, Single
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

__all__ = [
    "METHODS",
    "Constant",
    "Dapo",
    "DrGrpo",
    "ExOpd",
    "Grpd",
    "Grpo",
    "GrpoOpd",
    "Gspo",
    "Kat",
    "Kdrl",
    "Method",
    "MethodConfig",
    "Mix",
    "Opd",
    "Opdvr",
    "Part",
    "R2Opd",
    "RandomCut",
    "ReinforcePp",
    "Rloo",
    "Rstg",
    "Sdpo",
    "Sft",
    "Shaping",
    "Single",
    "Sipo",
    "SipoAnalytic",
    "VaOpd",
    "method_of",
]

Method = Annotated[Single | Mix, Field(discriminator="name")]

METHODS: dict[str, type[MethodConfig]] = {
    kind.model_fields["name"].default: kind for kind in (*get_args(get_args(Single)[0]), Mix)
}


def method_of(settings: "MethodConfig | str | Mapping[str, Any]") -> MethodConfig:
    """A method from its settings, its name, or the mapping that stands in a YAML.

    Raises:
      ConfigError: no such method; the message names the nearest.
    """
    if isinstance(settings, MethodConfig):
        return settings
    block = {"name": settings} if isinstance(settings, str) else dict(settings)
    name = block.get("name")
    if name not in METHODS:
        near = get_close_matches(str(name), METHODS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(METHODS))}"
        raise ConfigError(f"method.name: there is no method {name!r}; {hint}")
    return TypeAdapter(METHODS[name]).validate_python(block)
