"""What one training step sees, and what it is told to do.

Shape letters, the same in every file of this package:
  B responses   T token positions   V vocabulary   K top-k support   G prompts   U demonstration tokens

Masks are True where the token counts. Log-probs are in nats. Value t of any [B, T] tensor belongs to response token t.
Measurements are named as in the rollout record (design section 6): reward, truncated, student_logprobs, entropies, kl,
teacher_accuracy, scores.NAME, scores.NAME.top, demonstration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.errors import MissingMeasurement

Record = TypeVar("Record")

Metric = tuple[float, float]
"""A sum and a count; the reader divides."""

State = dict[str, list[float]]
"""What a stateful step remembers from step to step: plain numbers under a name, so that it can be read and resumed."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One scorer's log-probs of the student's tokens, under one context.

    Attributes:
      logprob_BT: log-probs of the sampled tokens.
      valid_BT: True where there is a score; a failed row is False all along.
      top_ids_BTK: ids of a support; -1 is padding.
      top_logprob_BTK: log-probs of that support.
    """

    logprob_BT: Float[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    top_ids_BTK: Int[Tensor, "B T K"] | None = None
    top_logprob_BTK: Float[Tensor, "B T K"] | None = None


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A stored text per row to imitate; rows without one have an empty mask.

    Attributes:
      ids_BU: token ids.
      mask_BU: True on the text's tokens.
    """

    ids_BU: Int[Tensor, "B U"]
    mask_BU: Bool[Tensor, "B U"]


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Student rollouts with everything that was measured about them; no gradients. None is: not measured.

    Attributes:
      group_B: which responses answer the same prompt.
      mask_BT: True on the student's own response tokens.
      reward_B: weighted sum of rewards; NaN is an unscored response.
      truncated_B: True where the response hit the length limit.
      student_logprob_BT: log-probs at rollout time ("old").
      entropy_BT: the student's entropy in nats at rollout time.
      reverse_kl_BT: KL(student || teacher) in nats per token.
      teacher_accuracy_B: share of the teacher's own answers to this prompt that are right.
      views: scorers by name: teacher, right, wrong, degraded, student (for its own top-k support).
      demonstration: texts for a likelihood term.
      step: number of optimizer updates before this batch.
      max_length: the run's limit on response tokens, where there is one.
    """

    group_B: Int[Tensor, " B"]
    mask_BT: Bool[Tensor, "B T"]
    reward_B: Float[Tensor, " B"] | None = None
    truncated_B: Bool[Tensor, " B"] | None = None
    student_logprob_BT: Float[Tensor, "B T"] | None = None
    entropy_BT: Float[Tensor, "B T"] | None = None
    reverse_kl_BT: Float[Tensor, "B T"] | None = None
    teacher_accuracy_B: Float[Tensor, " B"] | None = None
    views: Mapping[str, View] = field(default_factory=dict)
    demonstration: Demonstration | None = None
    step: int = 0
    max_length: int | None = None
    dtype: torch.dtype = torch.float32

    def need(self, name: str) -> Tensor:
        """The tensor of a measurement.

        Raises:
          MissingMeasurement: this batch does not have it, or there is no such measurement; the message names it.
        """
        known_measurement(name)
        value = getattr(self, _FIELD_OF[name])
        if value is None:
            raise MissingMeasurement(f"the method needs {name}, which this run does not measure")
        return value

    def has(self, name: str) -> bool:
        """Whether a measurement that `need` would give was made."""
        return getattr(self, _FIELD_OF.get(name, name)) is not None

    def texts(self) -> Demonstration:
        """The demonstrations; raises `MissingMeasurement` where there are none."""
        if self.demonstration is None:
            raise MissingMeasurement("the method needs demonstration, which this run does not measure")
        return self.demonstration

    def view(self, name: str) -> View:
        """The scores of one scorer; raises `MissingMeasurement` where there are none."""
        if name not in self.views:
            raise MissingMeasurement(
                f"the method needs scores.{name}, which this run does not measure (it has "
                f"{', '.join(sorted(f'scores.{v}' for v in self.views)) or 'no scores'})"
            )
        return self.views[name]

    def rows(self, index: slice | Tensor) -> Self:
        """The batch of the chosen rows."""
        return take_rows(self, index)


_FIELD_OF = {
    "reward": "reward_B",
    "truncated": "truncated_B",
    "student_logprobs": "student_logprob_BT",
    "entropies": "entropy_BT",
    "kl": "reverse_kl_BT",
    "teacher_accuracy": "teacher_accuracy_B",
}


def known_measurement(name: str) -> None:
    """Refuses the name of a measurement that no run makes.

    Raises:
      MissingMeasurement: has the nearest right name, and all of them.
    """
    if name in _FIELD_OF or name == "demonstration" or re.fullmatch(r"scores\.\w+(\.top)?", name):
        return
    near = get_close_matches(name, _FIELD_OF, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise MissingMeasurement(
        f"there is no measurement {name!r}; {hint}There are {', '.join(_FIELD_OF)}, demonstration, scores.VIEW and "
        "scores.VIEW.top"
    )


@dataclass(frozen=True, kw_only=True)
class Credit:
    """How much each sampled token is to be trained, and in which direction, while a chain is at work.

    Attributes:
      signal_BT: the direction and size before gates and weights (an advantage, or 0 for divergence terms).
      candidate_BTK: the same for each candidate of a top-k support, gated in place; None for sampled-token signals.
      known_BT: True where at least one signal is known: what counts in a denominator. A failed teacher row is not.
      gate_BT: True where the token trains.
      weight_BT: how strongly; never negative.
      branch_B: index of the route branch that took the row; -1 where none did or there is no route.
      metrics: name -> (sum, count).
    """

    signal_BT: Float[Tensor, "B T"]
    candidate_BTK: Float[Tensor, "B T K"] | None = None
    known_BT: Bool[Tensor, "B T"]
    gate_BT: Bool[Tensor, "B T"]
    weight_BT: Float[Tensor, "B T"]
    branch_B: Int[Tensor, " B"]
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def coefficient_BT(self) -> Float[Tensor, "B T"]:
        """The weight where the gate is open, 0 elsewhere."""
        return self.weight_BT * self.gate_BT

    def noting(self, name: str, total: float | Tensor, count: float | Tensor) -> "Credit":
        """This credit with one more metric, given as a sum and a count."""
        return replace(self, metrics={**self.metrics, name: (float(total), float(count))})


def take_rows(record: Record, index: slice | Tensor) -> Record:
    """A frozen record with each of its tensors, and the records inside it, cut to the chosen rows."""
    changes = {}
    for spec in fields(record):  # pyright: ignore[reportArgumentType]
        value = getattr(record, spec.name)
        if isinstance(value, Tensor):
            changes[spec.name] = value[index]
        elif isinstance(value, View | Demonstration):
            changes[spec.name] = take_rows(value, index)
        elif spec.name == "views":
            changes[spec.name] = {name: take_rows(view, index) for name, view in value.items()}
    return replace(record, **changes)  # pyright: ignore[reportArgumentType]
