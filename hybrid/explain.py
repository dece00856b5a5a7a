"""What a method would do with recorded rollouts, token by token and without a model.

Everything is computed in float64 by the same objective that trains. The student of the update is taken from the record:
its log-probs are `current_logprobs`, its divergence from the teacher is `kl` (reverse KL) or is made from the recorded
top-k supports with a tail bucket, its log-probs of a demonstration stand beside the demonstration.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import ConfigError, DataError, HybridError, MissingMeasurement
from hybrid.methods.base import MethodConfig, card_of
from hybrid.objective.divergence import divergence, with_tail
from hybrid.objective.losses import Divergence, StudentPass
from hybrid.objective.objective import Assignment, Loss, Objective, values
from hybrid.objective.signals import among, chosen
from hybrid.records import Records
from hybrid.types import RolloutBatch, State, View


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A method's credit for every token of a record, and the loss that comes of it.

    Attributes:
      method: the method with all its settings, or an objective.
      records: what was explained.
      advantage_BT: A, before the reduction; 0 where nothing trains.
      kl_weight_BT: c, likewise.
      kept_BT: True where some policy or divergence term trains the token.
      branches: name of the route branch of each response; None where there is none.
      loss: the three sums.
      metrics: name -> mean; None where nothing was counted.
      state: after this step.
    """

    method: MethodConfig | Objective
    records: Records
    advantage_BT: Float[Tensor, "B T"]
    kl_weight_BT: Float[Tensor, "B T"]
    kept_BT: Bool[Tensor, "B T"]
    branches: tuple[str | None, ...]
    loss: Loss
    metrics: Mapping[str, float | None]
    state: State

    @property
    def name(self) -> str:
        """The method's; of an objective, those of its terms."""
        return card_of(self.method)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the method; of an objective, its name."""
        return {"name": self.name} if isinstance(self.method, Objective) else self.method.model_dump(mode="json")

    def to_dict(self) -> dict[str, Any]:
        """The object that `hybrid explain --json` prints."""
        loss = {name: _plain(float(getattr(self.loss, name))) for name in ("policy", "kl", "sft", "total")}
        return {
            "method": self.settings,
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
    method: MethodConfig | Objective, records: Records, *, step: int | None = None, state: State | None = None
) -> dict[str, Any]:
    """The object that `hybrid explain --json` prints; see `explanation`."""
    return explanation(method, records, step=step, state=state).to_dict()


def explanation(
    method: MethodConfig | Objective, records: Records, *, step: int | None = None, state: State | None = None
) -> Explanation:
    """Assigns a method's credit to recorded rollouts and computes the loss at the recorded student.

    Args:
      method: the method and its settings, or an objective of your own.
      records: one generation batch.
      step: number of updates made before this batch, for every schedule; None is that of the records.
      state: of a stateful method before this batch; None is its first.

    Raises:
      MissingMeasurement: the record lacks what the method reads.
      ConfigError: `state` is not this method's.
      HybridError: a result is not a finite number.
    """
    objective = method if isinstance(method, Objective) else method.build()
    name = card_of(method)[0]
    batch = records.batch if step is None else replace(records.batch, step=step)
    batch = _in_one_order(batch, objective, records.response_ids)
    made = {loss: _top_divergence(batch, loss) for loss in objective.divergences if _from_supports(batch, loss)}
    _need_all(batch, objective, made.keys(), records.partial)
    if batch.reverse_kl_BT is None:
        to_teacher = (made[x] for x in made if x.kind == "reverse_kl" and x.view == "teacher")
        batch = replace(batch, reverse_kl_BT=next(to_teacher, None))
    assignment, new_state = objective.assign(batch, _checked_state(state, objective))
    loss = objective.loss(assignment, batch, _student_pass(records, batch, objective, made))
    for part in ("policy", "kl", "sft"):
        value = float(getattr(loss, part))
        if not math.isfinite(value):
            raise HybridError(
                f"the {part} loss of {name} is {value}: a setting or a number of the record is too large "
                f"({_most_extreme(records)}); bound it (ratio_clip) or take it out"
            )
    advantage_BT, kl_weight_BT = values(assignment, objective, ("policy",)), values(assignment, objective, ("kl",))
    metrics = {key: total / count if count else None for key, (total, count) in assignment.metrics.items()}
    _refuse_overflow(name, (advantage_BT, kl_weight_BT), (metrics.values(), *new_state.values()))
    kept_BT = torch.zeros_like(batch.mask_BT)
    for term, credit in zip(objective.terms, assignment.terms, strict=True):
        if term.kind != "sft":
            kept_BT = kept_BT | credit.kept_BT
    return Explanation(
        method=method,
        records=records,
        advantage_BT=advantage_BT,
        kl_weight_BT=kl_weight_BT,
        kept_BT=kept_BT,
        branches=_branches(objective, assignment, len(records.response_ids)),
        loss=loss,
        metrics=metrics,
        state=new_state,
    )


def _refuse_overflow(
    name: str, credit: Iterable[Float[Tensor, "B T"]], numbers: Iterable[Iterable[float | None]]
) -> None:
    """Refuses results that overflowed; JSON has no word for them.

    Raises:
      HybridError: some number is not finite.
    """
    tensors = all(bool(value_BT.isfinite().all()) for value_BT in credit)
    if not tensors or not all(x is None or math.isfinite(x) for x in chain.from_iterable(numbers)):
        raise HybridError(
            f"{name} ends in a number that is not finite; a setting, or a number of the record, is too large for it"
        )


def _most_extreme(records: Records) -> str:
    """Where the largest log-prob of the record stands, and what it is."""
    batch = records.batch
    found = {f"scores.{name}.logprobs": view.logprob_BT for name, view in batch.views.items()}
    found |= {"current_logprobs": records.current_logprob_BT, "student_logprobs": batch.student_logprob_BT}
    sizes = {
        key: x.abs().nan_to_num(nan=0.0).masked_fill(~batch.mask_BT, 0) for key, x in found.items() if x is not None
    }
    key = max(sizes, key=lambda name: float(sizes[name].max()))
    row, place = divmod(int(sizes[key].argmax()), sizes[key].shape[-1])
    value = found[key]
    assert value is not None
    return f"{key}[{place}] of response {records.response_ids[row]} is {float(value[row, place]):g}"


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
      ConfigError: a name that the method does not keep, or another number of values than it keeps.
    """
    first = objective.init()
    for name, numbers in (state or {}).items():
        if name not in first:
            near = get_close_matches(name, first, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it keeps {', '.join(first) or 'no state'}"
            raise ConfigError(f"state: the method keeps no {name!r}; {hint}")
        if first[name] and len(numbers) != len(first[name]):
            raise ConfigError(f"state: {name} has {len(numbers)} numbers; the method keeps {len(first[name])}")
    return first | dict(state or {})


def _need_all(
    batch: RolloutBatch, objective: Objective, made: Collection[Divergence], partial: Mapping[str, str]
) -> None:
    """Refuses a record without a measurement that some step or loss reads, before anything is computed.

    A reverse KL that is among the `made` ones need not have been measured.
    """
    unmade = [loss for loss in objective.divergences if loss.kind == "reverse_kl" and loss not in made]
    for need in sorted(objective.needs):
        for told in (need, f"{need}.logprobs", need.replace("student", "current")):
            if told in partial:
                raise DataError(partial[told])
        if need == "kl" and made and not unmade:
            continue
        if need.startswith("scores."):
            _need_scores(batch, need)
        elif not batch.has(need):
            raise _lacking(need)


def _need_scores(batch: RolloutBatch, need: str) -> None:
    """Refuses a record without a scorer, or without the kind of scores that is asked of it."""
    name, _, part = need.removeprefix("scores.").partition(".")
    if name not in batch.views:
        has = ", ".join(sorted(f"scores.{name}" for name in batch.views)) or "no scores"
        raise _lacking(need, f" (it has {has})")
    if part and batch.views[name].top_logprob_BTK is None:
        raise _lacking(f"{need} (top_ids and top_logprobs)")
    if not part and bool(batch.views[name].logprob_BT.isnan().any()):
        raise _lacking(f"{need}.logprobs")


def _lacking(need: str, beside: str = "") -> MissingMeasurement:
    """What is said of a measurement that no line of the record has."""
    return MissingMeasurement(
        f"the method needs {need}, which no line of the record has{beside}; record it, or ask a method that does "
        "without it (`hybrid methods NAME` says what each needs)"
    )


def _in_one_order(batch: RolloutBatch, objective: Objective, response_ids: Sequence[str]) -> RolloutBatch:
    """The batch with all supports that the objective reads in the order of the student's ids."""
    student = batch.views.get("student")
    # What looks at the candidates of both sides takes each side's own list.
    alone = {c.support for c in objective.candidates} == {"intersection"}
    wanted = set() if alone else {need.split(".")[1] for need in objective.needs if need.endswith(".top")} - {"student"}
    wanted |= {loss.view for loss in objective.divergences if _from_supports(batch, loss)}
    if student is None or student.top_logprob_BTK is None:
        return batch
    views = dict(batch.views)
    for name in sorted(wanted & views.keys()):
        if views[name].top_logprob_BTK is not None:
            views[name] = _in_order_of(student, views[name], name, batch.mask_BT, response_ids)
    return replace(batch, views=views)


def _from_supports(batch: RolloutBatch, loss: Divergence) -> bool:
    """Whether a divergence is made from the recorded supports.

    A reverse KL from the teacher is what `kl` holds, if it was measured; a full one is more than a support can tell.
    """
    views = [batch.views.get(name) for name in ("student", loss.view)]
    if any(view is None or view.top_logprob_BTK is None for view in views):
        return False
    if loss.kind != "reverse_kl":
        return True
    return loss.support != "full" and (batch.reverse_kl_BT is None or loss.view != "teacher")


def _student_pass(
    records: Records, batch: RolloutBatch, objective: Objective, made: Mapping[Divergence, Float[Tensor, "B T"]]
) -> StudentPass:
    """The student of the update, as the record has it; zeros where no term reads it."""
    zeros_BT = torch.zeros(batch.mask_BT.shape, dtype=batch.dtype)
    student = batch.views.get("student")
    divergences = {}
    for loss in objective.divergences:
        value_BT = made.get(loss, batch.reverse_kl_BT)
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
        raise _lacking("demonstration.logprobs")
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
    if loss.support == "full":
        return torch.ones_like(student_BTK, dtype=torch.bool)
    return chosen(student_BTK, teacher_BTK, loss.support, loss.top_k)


def _in_order_of(
    student: View, scorer: View, name: str, mask_BT: Bool[Tensor, "B T"], response_ids: Sequence[str]
) -> View:
    """A scorer's support in the order of the student's ids.

    Raises:
      DataError: the two supports of a scored token hold different ids.
    """
    assert student.top_ids_BTK is not None
    assert scorer.top_ids_BTK is not None
    width = max(student.top_ids_BTK.shape[-1], scorer.top_ids_BTK.shape[-1])
    own, other = _widened(student.top_ids_BTK, width, -1), _widened(scorer.top_ids_BTK, width, -1)
    live_BT = scorer.valid_BT & mask_BT
    same_BT = (own.sort(-1).values == other.sort(-1).values).all(-1)
    if not bool((same_BT | ~live_BT).all()):
        row, place = (~same_BT & live_BT).nonzero()[0].tolist()
        raise DataError(
            f"response {response_ids[row]}: scores.student.top_ids[{place}] and scores.{name}.top_ids[{place}] hold "
            "different ids; record both on one support"
        )
    return replace(scorer, top_ids_BTK=student.top_ids_BTK, top_logprob_BTK=among(student.top_ids_BTK, scorer))


def _widened(value_BTK: Tensor, width: int, fill: float) -> Tensor:
    """A [B, T, K] tensor padded to K = width."""
    extra = value_BTK.new_full((*value_BTK.shape[:-1], width - value_BTK.shape[-1]), fill)
    return torch.cat([value_BTK, extra], -1)
