"""Every method, by name. A new one is a new file and its name in `mix.Single`."""

from typing import Annotated, get_args

from pydantic import Field

from hybrid.methods.base import MethodConfig
from hybrid.methods.mix import Mix, Single

Method = Annotated[Single | Mix, Field(discriminator="name")]

METHODS: dict[str, type[MethodConfig]] = {
    kind.model_fields["name"].default: kind for kind in (*get_args(get_args(Single)[0]), Mix)
}
