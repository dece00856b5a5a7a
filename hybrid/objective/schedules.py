"""Numbers that change with the step: where one may stand, `0.5` or `{start: 1.0, end: 0.0, steps: 100}`."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Schedule(BaseModel):
    """A number that moves from `start` to `end` within `steps` optimizer updates and then stays.

        linear:  start + (end - start) * min(k / steps, 1)
        cosine:  end + (start - end) * (1 + cos(pi * min(k / steps, 1))) / 2

    with k the number of updates made before this batch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    start: float = Field(description="Value at the first update.")
    end: float = Field(description="Value from update `steps` on.")
    steps: int = Field(ge=1, description="Number of updates that the way takes.")
    shape: Literal["linear", "cosine"] = Field(default="linear", description="Form of the way.")

    def at(self, step: int) -> float:
        """The value before update number `step`, counted from 0."""
        done = min(step / self.steps, 1.0)
        if self.shape == "linear":
            return (1 - done) * self.start + done * self.end
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


Number = float | Schedule
"""A setting that may be a schedule."""


def ends(number: Number) -> tuple[float, float]:
    """The first and the last value; all others lie between them."""
    return (number.start, number.end) if isinstance(number, Schedule) else (number, number)


def _not_negative(number: Number) -> Number:
    if min(ends(number)) < 0:
        raise ValueError(
            f"is a weight, which is not negative; got {min(ends(number)):g}, which would train away from what is wanted"
        )
    return number


def _share(number: Number) -> Number:
    if min(ends(number)) < 0 or max(ends(number)) > 1:
        raise ValueError("is a share, which lies between 0 and 1")
    return number


Weight = Annotated[Number, AfterValidator(_not_negative)]
"""A number or schedule that is never negative: the factor of a loss."""

Share = Annotated[Number, AfterValidator(_share)]
"""A number or schedule in [0, 1]."""

Scale = Number | Callable[[int], float]
"""A number, a schedule, or a method's own function of the step."""


def at(number: Scale, step: int) -> float:
    """The value of a number, schedule or function before update `step`."""
    if isinstance(number, Schedule):
        return number.at(step)
    return float(number(step)) if callable(number) else float(number)


def linear_floor(start: float, per_step: float, floor: float, step: int) -> float:
    """max(floor, start - per_step * step), the annealing of RSTG (arXiv 2608.00782) and KDRL."""
    return max(floor, start - per_step * step)
