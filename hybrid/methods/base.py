"""What every method is: frozen settings, the paper's as defaults, and one sentence in the grammar."""

import abc
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from hybrid.objective.objective import Objective


class MethodConfig(BaseModel, abc.ABC):
    """Settings of a method. A subclass adds `name: Literal[...]`, its fields, and `build`.

    Attributes:
      formula: what is computed, as plain text for `hybrid methods NAME` and the method's page.
      paper: title and identifier.
      min_generations: smallest number of responses per prompt that means anything.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    formula: ClassVar[str]
    paper: ClassVar[str]
    min_generations: ClassVar[int] = 1

    name: str

    @abc.abstractmethod
    def build(self) -> Objective:
        """The objective that these settings describe."""
