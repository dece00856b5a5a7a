"""Every method, by name. A new one is a new file and its name in `mix.Single`."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from hybrid.errors import ConfigError
from hybrid.methods.base import MethodConfig
from hybrid.methods.mix import Mix, Single

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
