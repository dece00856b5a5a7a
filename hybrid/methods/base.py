"""What every method is: frozen settings, the paper's as defaults, and one sentence in the grammar."""

import abc
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybrid.objective.kl_trap import OnlineStop
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective


@dataclass(frozen=True)
class ViewSpec:
    """How a method wants one of its views (`scores.NAME`) to be made.

    Attributes:
      scorer: the run's teacher, or the student itself.
      context: name of the context that the scorer's prompt is built under; None is the student's own prompt.
      options: settings of that context and of the scorer, by name.
    """

    scorer: Literal["teacher", "self"] = "teacher"
    context: str | None = None
    options: Mapping[str, str | int | float] = field(default_factory=dict)


LARGEST = 2**53
"""Largest whole number of a setting: above it, not every one is a floating-point number."""


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

    @model_validator(mode="after")
    def _refuse_numbers_that_no_tensor_holds(self) -> Self:
        for key, value in self:
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{key} is too large; got {value}")
        return self

    @abc.abstractmethod
    def build(self) -> Objective:
        """The objective that these settings describe."""

    @property
    def views(self) -> Mapping[str, ViewSpec]:
        """How the views are made that are not simply the teacher under the student's own prompt."""
        return {}

    @property
    def online_stop(self) -> OnlineStop | None:
        """What ends responses while they are written; None for a method that wants them whole."""
        return None


class ClippedMethod(MethodConfig):
    """A method that trains PPO's clipped surrogate."""

    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count.")

    def policy_loss(self) -> PolicyLoss:
        """The surrogate with these bounds."""
        return PolicyLoss(self.clip_low, self.clip_high)


def card_of(method: MethodConfig | Objective) -> tuple[str, dict[str, str], list[str]]:
    """Name, paper and tags of a method for a model's card; an objective of one's own has the names of its terms."""
    if isinstance(method, Objective):
        return " + ".join(dict.fromkeys(term.name for term in method.terms)), {}, ["trl", "hybrid"]
    named = re.match(r"([^(;]+) \(arXiv (\d+\.\d+)\)", method.paper)
    paper = {} if named is None else {"title": named[1], "id": named[2]}
    return method.name, paper, ["trl", "hybrid", method.name]
