"""What a method would do with recorded rollouts, token by token and without a model.

Everything is computed in float64 by the same objective that trains. The student of the update is taken from the record:
its log-probs are `current_logprobs`, its divergence from the teacher is `kl` (reverse KL) or is made from the recorded
top-k supports with a tail bucket, its log-probs of a demonstration stand beside the demonstration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import ConfigError, DataError, HybridError, MissingMeasurement
from hybrid.methods.base import MethodConfig
from hybrid.objective.divergence import divergence, with_tail
from hybrid.objective.losses import Divergence, StudentPass
from hybrid.objective.objective import Assignment, Loss, Objective, values
from hybrid.objective.signals import largest
from hybrid.records import Records
from hybrid.types import RolloutBatch, State, View


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A method's credit for every token of a record, and the loss that comes of it.

    Attributes:
      method: the method with all its settings.
      records: what was explained.
      advantage_BT: A, before the reduction; 0 where nothing trains.
      kl_weight_BT: c, likewise.
      kept_BT: True where some policy or divergence term trains the token.
      branches: name of the route branch of each response; None where there is none.
      loss: the three sums.
      metrics: name -> mean; None where nothing was counted.
      state: after this step.
    """

    method: MethodConfig
    records: Records
    advantage_BT: Float[Tensor, "B T"]
    kl_weight_BT: Float[Tensor, "B T"]
    kept_BT: Bool[Tensor, "B T"]
    branches: tuple[str | None, ...]
    loss: Loss
    metrics: Mapping[str, float | None]
    state: State

    def to_dict(self) -> dict[str, Any]:
        """The object that `hybrid explain --json` prints."""
        loss = {name: _plain(float(getattr(self.loss, name))) for name in ("policy", "kl", "sft", "total")}
        return {
            "method": self.method.model_dump(mode="json"),
            "responses": [
                {
                    "response_id": self.records.response_ids[row],
                    "branch": self.branches[row],
                    "advantages": [_plain(x) for x in self.advantage_BT[row, :length].tolist()],
                    "kl_weights": [_plain(x) for x in self.kl_weight_BT[row, :length].tolist()],
                    "kept": self.kept_BT[row, :length].int().tolist(),
                }
                for row, length in enumerate(self.records.lengths)
            ],
            "loss": loss,
            "metrics": {name: None if mean is None else _plain(mean) for name, mean in self.metrics.items()},
            "state": {name: [_plain(x) for x in numbers] for name, numbers in self.state.items()},
        }


def _plain(value: float) -> float:
    """The number without a sign on zero."""
    return value + 0.0


def explain(
    method: MethodConfig, records: Records, *, step: int | None = None, state: State | None = None
) -> dict[str, Any]:
    """The object that `hybrid explain --json` prints; see `explanation`."""
    return explanation(method, records, step=step, state=state).to_dict()


def explanation(
    method: MethodConfig, records: Records, *, step: int | None = None, state: State | None = None
) -> Explanation:
    """Assigns a method's credit to recorded rollouts and computes the loss at the recorded student.

    Args:
      method: the method and its settings.
      records: one generation batch.
      step: number of updates made before this batch, for every schedule; None is that of the records.
      state: of a stateful method before this batch; None is its first.

    Raises:
      MissingMeasurement: the record lacks what the method reads.
      ConfigError: `state` is not this method's.
      HybridError: a result is not a finite number.
    """
    objective = method.build()
    batch = records.batch if step is None else replace(records.batch, step=step)
    batch = _complete(batch, objective)
    _need_all(batch, objective, records.partial)
    assignment, new_state = objective.assign(batch, _checked_state(state, objective))
    loss = objective.loss(assignment, batch, _student_pass(records, batch, objective))
    for name in ("policy", "kl", "sft"):
        value = float(getattr(loss, name))
        if not math.isfinite(value):
            raise HybridError(f"the {name} loss of {method.name} is {value}; look for extreme log-probs in the record")
    kept_BT = torch.zeros_like(batch.mask_BT)
    for term, credit in zip(objective.terms, assignment.terms, strict=True):
        if term.kind != "sft":
            kept_BT = kept_BT | credit.kept_BT
    return Explanation(
        method=method,
        records=records,
        advantage_BT=values(assignment, objective, ("policy",)),
        kl_weight_BT=values(assignment, objective, ("kl",)),
        kept_BT=kept_BT,
        branches=_branches(objective, assignment, len(records.response_ids)),
        loss=loss,
        metrics={name: total / count if count else None for name, (total, count) in assignment.metrics.items()},
        state=new_state,
    )


def _branches(objective: Objective, assignment: Assignment, num_rows: int) -> tuple[str | None, ...]:
    """The first route branch that took each row, over the terms in their order."""
    names: list[str | None] = [None] * num_rows
    for term, credit in zip(objective.terms, assignment.terms, strict=True):
        for row, index in enumerate(credit.branch_B.tolist()):
            if names[row] is None and index >= 0:
                names[row] = term.credit.branches[index]
    return tuple(names)


def _checked_state(state: State | None, objective: Objective) -> State:
    """The state before this step: what was given over the method's first.

    Raises:
      ConfigError: a name that the method does not keep.
    """
    first = objective.init()
    for name in state or {}:
        if name not in first:
            near = get_close_matches(name, first, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it keeps {', '.join(first) or 'no state'}"
            raise ConfigError(f"state: the method keeps no {name!r}; {hint}")
    return first | dict(state or {})


def _need_all(batch: RolloutBatch, objective: Objective, partial: Mapping[str, str]) -> None:
    """Refuses a record without a measurement that some step or loss reads, before anything is computed."""
    for need in sorted(objective.needs):
        for told in (need, f"{need}.logprobs", need.replace("student", "current")):
            if told in partial:
                raise DataError(partial[told])
        name, _, part = need.removeprefix("scores.").partition(".")
        if need == "demonstration":
            batch.texts()
        elif not need.startswith("scores."):
            batch.need(need)
        elif part:
            if name not in batch.views or batch.views[name].top_logprob_BTK is None:
                raise MissingMeasurement(f"the method needs {need} (top_ids and top_logprobs), which the record lacks")
        elif bool(batch.view(name).logprob_BT.isnan().any()):
            raise MissingMeasurement(f"the method needs {need}.logprobs, which the record lacks")


def _complete(batch: RolloutBatch, objective: Objective) -> RolloutBatch:
    """The batch with all supports in the order of the student's ids, and the reverse KL made from them.

    The KL is made where it was not measured and a top-k one is asked for; a full one is more than a support can tell.
    """
    student = batch.views.get("student")
    wanted = {need.split(".")[1] for need in objective.needs if need.endswith(".top")} - {"student"}
    asked = [loss for loss in objective.divergences if loss.kind == "reverse_kl" and loss.support != "full"]
    missing_kl = batch.reverse_kl_BT is None and bool(asked)
    wanted |= {loss.view for loss in asked if missing_kl}
    if student is None or student.top_logprob_BTK is None:
        return batch
    views = dict(batch.views)
    for name in sorted(wanted & views.keys()):
        if views[name].top_logprob_BTK is not None:
            views[name] = _in_order_of(student, views[name], name, batch.mask_BT)
    batch = replace(batch, views=views)
    if not missing_kl or asked[0].view not in views or views[asked[0].view].top_logprob_BTK is None:
        return batch
    return replace(batch, reverse_kl_BT=_top_divergence(batch, asked[0]))


def _student_pass(records: Records, batch: RolloutBatch, objective: Objective) -> StudentPass:
    """The student of the update, as the record has it; zeros where no term reads it."""
    zeros_BT = torch.zeros(batch.mask_BT.shape, dtype=batch.dtype)
    student = batch.views.get("student")
    divergences = {}
    for loss in objective.divergences:
        value_BT = batch.reverse_kl_BT if loss.kind == "reverse_kl" else _top_divergence(batch, loss)
        assert value_BT is not None, "_need_all() has asked for it"
        divergences[loss] = value_BT
    return StudentPass(
        logprob_BT=zeros_BT if records.current_logprob_BT is None else records.current_logprob_BT,
        candidate_logprob_BTK=None if student is None else student.top_logprob_BTK,
        divergence_BT=divergences,
        demonstration_logprob_BU=_demonstration_logprobs(records, objective),
    )


def _demonstration_logprobs(records: Records, objective: Objective) -> Float[Tensor, "B U"] | None:
    text = records.batch.demonstration
    if text is None or not any(term.kind == "sft" for term in objective.terms):
        return None
    if records.demonstration_logprob_BU is not None:
        return records.demonstration_logprob_BU
    if bool(text.mask_BU.any()):
        raise MissingMeasurement("the method needs demonstration.logprobs, which the record lacks")
    return torch.zeros(text.mask_BU.shape, dtype=records.batch.dtype)


def _top_divergence(batch: RolloutBatch, loss: Divergence) -> Float[Tensor, "B T"]:
    """A divergence from the recorded supports with a tail bucket; 0 where the teacher is not known."""
    student_BTK, teacher_BTK = batch.view("student").top_logprob_BTK, batch.view(loss.view).top_logprob_BTK
    assert student_BTK is not None
    assert teacher_BTK is not None
    # Dead positions may hold anything; two empty supports are 0 apart.
    live_BT = batch.view(loss.view).valid_BT & batch.mask_BT
    keep_BTK = _kept_support(student_BTK, teacher_BTK, loss) & live_BT[..., None]
    student_log, teacher_log = (with_tail(x.masked_fill(~keep_BTK, -torch.inf)) for x in (student_BTK, teacher_BTK))
    return divergence(student_log, teacher_log, loss.kind, loss.beta).masked_fill(~live_BT, 0)


def _kept_support(
    student_BTK: Float[Tensor, "B T K"], teacher_BTK: Float[Tensor, "B T K"], loss: Divergence
) -> Bool[Tensor, "B T K"]:
    """Which of the recorded candidates the divergence looks at, the rest being its tail."""
    by_student, by_teacher = largest(student_BTK, loss.top_k), largest(teacher_BTK, loss.top_k)
    if loss.support == "full":
        return torch.ones_like(by_student)
    return {"student": by_student, "teacher": by_teacher, "union": by_student | by_teacher}[loss.support]


def _in_order_of(student: View, scorer: View, name: str, mask_BT: Bool[Tensor, "B T"]) -> View:
    """A scorer's support in the order of the student's ids.

    Raises:
      DataError: the two supports of a scored token hold different ids.
    """
    assert student.top_ids_BTK is not None
    assert scorer.top_ids_BTK is not None
    assert scorer.top_logprob_BTK is not None
    width = max(student.top_ids_BTK.shape[-1], scorer.top_ids_BTK.shape[-1])
    own, other = _widened(student.top_ids_BTK, width, -1), _widened(scorer.top_ids_BTK, width, -1)
    live_BT = scorer.valid_BT & mask_BT
    same_BT = (own.sort(-1).values == other.sort(-1).values).all(-1)
    if not bool((same_BT | ~live_BT).all()):
        row, place = (~same_BT & live_BT).nonzero()[0].tolist()
        raise DataError(
            f"scores.student.top_ids and scores.{name}.top_ids hold different ids (response {row}, token {place}, both "
            "counted from 0); record both on one support"
        )
    # The k-th smallest id of one stands where the k-th smallest of the other does.
    rank_BTK = own.sort(dim=-1, stable=True).indices.sort(dim=-1, stable=True).indices
    sorted_BTK = _widened(scorer.top_logprob_BTK, width, -torch.inf).gather(-1, other.sort(dim=-1, stable=True).indices)
    narrow = slice(student.top_ids_BTK.shape[-1])
    return replace(
        scorer, top_ids_BTK=student.top_ids_BTK, top_logprob_BTK=sorted_BTK.gather(-1, rank_BTK)[..., narrow]
    )


def _widened(value_BTK: Tensor, width: int, fill: float) -> Tensor:
    """A [B, T, K] tensor padded to K = width."""
    extra = value_BTK.new_full((*value_BTK.shape[:-1], width - value_BTK.shape[-1]), fill)
    return torch.cat([value_BTK, extra], -1)
