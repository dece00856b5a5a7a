"""What every method is: frozen settings, the paper's as defaults, and one sentence in the grammar."""

import abc
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective


class MethodConfig(BaseModel, abc.ABC):
    """Settings of a method. A subclass adds `name: Literal[...]`, its fields, and `build`.

    Attributes:
      formula: what is computed, as plain text for `hybrid methods NAME` and the method's page.
      paper: title and identifier.
      min_generations: smallest number of responses per prompt that means anything.
      sources: setting -> where its default was read; a setting of ours says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    formula: ClassVar[str]
    paper: ClassVar[str]
    min_generations: ClassVar[int] = 1
    sources: ClassVar[Mapping[str, str]] = {}

    name: str

    @abc.abstractmethod
    def build(self) -> Objective:
        """The objective that these settings describe."""


class ClippedMethod(MethodConfig):
    """A method that trains PPO's clipped surrogate."""

    clip_low: float = Field(0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(0.2, ge=0, description="How far above 1 the ratio may count.")

    def policy_loss(self) -> PolicyLoss:
        """The surrogate with these bounds."""
        return PolicyLoss(self.clip_low, self.clip_high)
