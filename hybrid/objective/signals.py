"""Signals: which way, and how far, each sampled token should move."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from hybrid.objective.groups import Scale, group_advantage, group_uniform, mixed
from hybrid.objective.schedules import Number, at
from hybrid.objective.step import Candidates, CandidateSupport, Phase, Signal, Step, signal
from hybrid.types import Credit, RolloutBatch, State, View

CandidateWeight = Literal["student_p", "teacher_p", "none"]
"""By which probabilities, renormalised over the candidates, a top-k signal is weighted."""


def teacher_gap(
    teacher_logprob_BT: Float[Tensor, "*B T"], student_logprob_BT: Float[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """How much likelier the teacher finds the sampled token: log pT(y_t) - log pS(y_t), in nats."""
    return teacher_logprob_BT - student_logprob_BT


def clipped(value: Float[Tensor, "*s"], bound: float | None) -> Float[Tensor, "*s"]:
    """The value within [-bound, bound]; as it is without a bound."""
    return value if bound is None else value.clamp(-bound, bound)


def with_metric(step: Step, name: str, measure: Callable[[RolloutBatch], tuple[Tensor, Tensor]]) -> Step:
    """A stateless step that also notes a metric of the batch, as a sum and a count."""

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        credit, state = step.apply(credit, batch, state)
        return credit.noting(name, *measure(batch)), state

    return step._replace(apply=apply)


class RewardOf(NamedTuple):
    """The scalar that a response is judged by, and the measurements it reads; NaN is an unscored response."""

    value: Callable[[RolloutBatch], Float[Tensor, " B"]]
    needs: frozenset[str] = frozenset({"reward"})


PLAIN = RewardOf(lambda batch: batch.need("reward"))
"""The reward as it was given."""


def from_teacher_gap(*, scale: Number = 1.0, clip: float | None = None, view: str = "teacher") -> Step:
    """A gap, scale * clip(log pT - log pS): the sampled-token reverse KL as an advantage (on-policy distillation)."""

    def fn(batch: RolloutBatch) -> Signal:
        scores = batch.view(view)
        gap_BT = teacher_gap(scores.logprob_BT, batch.need("student_logprobs"))
        return Signal(at(scale, batch.step) * clipped(gap_BT, clip), scores.valid_BT)

    def at_clip(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        scores = batch.view(view)
        use_BT = scores.valid_BT & batch.mask_BT
        gap_BT = teacher_gap(scores.logprob_BT, batch.need("student_logprobs"))
        return ((gap_BT.abs() >= (clip or torch.inf)) & use_BT).sum(), use_BT.sum()

    step = signal("gap", fn, needs=[f"scores.{view}", "student_logprobs"])
    return step if clip is None else with_metric(step, "gap/at_clip", at_clip)


def from_group_advantage(
    *,
    scale: Scale = "none",
    eps: float = 1e-4,
    reward: RewardOf = PLAIN,
    drop_uniform: bool = False,
) -> Step:
    """The group-relative reward advantage, the same for every token of a response; known for every response.

    `reward` may shape the reward first. `drop_uniform` leaves groups of equal (unshaped) rewards out of the
    denominator too, as DAPO's dynamic sampling does.
    """

    def fn(batch: RolloutBatch) -> Signal:
        advantage_B = group_advantage(reward.value(batch), batch.group_B, scale=scale, eps=eps)
        known_BT = batch.mask_BT & mixed().test(batch)[:, None] if drop_uniform else batch.mask_BT
        return Signal(advantage_B[:, None].expand(batch.mask_BT.shape), known_BT)

    def uniform(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        uniform_B = group_uniform(batch.need("reward"), batch.group_B)
        return uniform_B.sum(), torch.tensor(len(uniform_B))

    step = signal("group_advantage", fn, needs=sorted(reward.needs))
    return with_metric(step, "group_advantage/uniform", uniform)


def candidate_weight(
    student_logprob_BTK: Float[Tensor, "B T K"], teacher_logprob_BTK: Float[Tensor, "B T K"], weighting: CandidateWeight
) -> Float[Tensor, "B T K"]:
    """Probabilities renormalised over the K candidates, or 1 for "none"; what holds -inf is no candidate and gets 0.

    thunlp/OPD's README calls "none" no weighting, as here; its code divides by the number of candidates.
    """
    if weighting == "none":
        return student_logprob_BTK.isfinite().to(student_logprob_BTK.dtype)
    logprob_BTK = student_logprob_BTK if weighting == "student_p" else teacher_logprob_BTK
    return torch.softmax(logprob_BTK, -1).nan_to_num(nan=0.0)


def largest(logprob_BTK: Float[Tensor, "B T K"], top_k: int | None) -> Bool[Tensor, "B T K"]:
    """True on the `top_k` largest entries of each position, the first of equal ones; all of them for None."""
    if top_k is None or top_k >= logprob_BTK.shape[-1]:
        return torch.ones_like(logprob_BTK, dtype=torch.bool)
    order_BTK = logprob_BTK.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(logprob_BTK, dtype=torch.bool).scatter(-1, order_BTK[..., :top_k], True)


def among(ids_BTK: Int[Tensor, "B T K"], scorer: View) -> Float[Tensor, "B T K"]:
    """A scorer's log-probs of some ids; -inf for padding, and for what its own list does not hold."""
    assert scorer.top_ids_BTK is not None
    assert scorer.top_logprob_BTK is not None
    held_BTK, order_BTK = pad(scorer.top_ids_BTK, (0, 1), value=-1).sort(-1)
    place_BTK = torch.searchsorted(held_BTK, ids_BTK.contiguous()).clamp(max=held_BTK.shape[-1] - 1)
    is_held_BTK = (held_BTK.gather(-1, place_BTK) == ids_BTK) & (ids_BTK >= 0)
    logprob_BTK = pad(scorer.top_logprob_BTK, (0, 1), value=-torch.inf)
    return logprob_BTK.gather(-1, order_BTK.gather(-1, place_BTK)).masked_fill(~is_held_BTK, -torch.inf)


def common(student: View, teacher: View, top_k: int | None) -> tuple[Float[Tensor, "B T K"], Float[Tensor, "B T K"]]:
    """Both sides' log-probs of the ids in both of their own top-k lists, in the student's order; -inf elsewhere."""
    assert student.top_ids_BTK is not None
    assert student.top_logprob_BTK is not None
    assert teacher.top_logprob_BTK is not None
    keep_BTK = largest(teacher.top_logprob_BTK, top_k)
    teacher = replace(teacher, top_logprob_BTK=teacher.top_logprob_BTK.masked_fill(~keep_BTK, -torch.inf))
    teacher_BTK = among(student.top_ids_BTK, teacher)
    apart_BTK = ~(largest(student.top_logprob_BTK, top_k) & (teacher_BTK > -torch.inf))
    student_BTK = student.top_logprob_BTK.masked_fill(apart_BTK, -torch.inf)
    return student_BTK, teacher_BTK.masked_fill(apart_BTK, -torch.inf)


def chosen(
    student_BTK: Float[Tensor, "B T K"],
    teacher_BTK: Float[Tensor, "B T K"],
    support: Literal["student", "teacher", "union"],
    top_k: int | None,
) -> Bool[Tensor, "B T K"]:
    """Which of the candidates that both sides scored are the `top_k` likeliest of one side, or of either."""
    by_student_BTK, by_teacher_BTK = largest(student_BTK, top_k), largest(teacher_BTK, top_k)
    if support == "union":
        return by_student_BTK | by_teacher_BTK
    return by_student_BTK if support == "student" else by_teacher_BTK


def from_candidate_gap(
    *,
    top_k: int | None = None,
    weighting: CandidateWeight = "student_p",
    clip: float | None = None,
    support: CandidateSupport = "student",
) -> Step:
    """The gap of each of the top-k candidates, weighted: w_k * (log pT_k - log pS_k).

    The signal of a token is the sum over its candidates; gates act on each candidate by itself. A wider measured
    support is cut to the `top_k` likeliest. Weights are renormalised over the candidates that are left. A token whose
    sides have no candidate in common has the signal 0 and counts in the denominator, as in thunlp/OPD.
    """

    def fn(batch: RolloutBatch) -> Signal:
        student, teacher = batch.view("student"), batch.view("teacher")
        student_BTK, teacher_BTK = student.top_logprob_BTK, teacher.top_logprob_BTK
        assert student_BTK is not None, "collect() and the records fill both or neither"
        assert teacher_BTK is not None, "collect() and the records fill both or neither"
        if support == "intersection":
            student_BTK, teacher_BTK = common(student, teacher, top_k)
        else:
            keep_BTK = chosen(student_BTK, teacher_BTK, support, top_k)
            student_BTK, teacher_BTK = (x.masked_fill(~keep_BTK, -torch.inf) for x in (student_BTK, teacher_BTK))
        weight_BTK = candidate_weight(student_BTK, teacher_BTK, weighting)
        gap_BTK = clipped((teacher_BTK - student_BTK).masked_fill(weight_BTK == 0, 0), clip)
        candidate_BTK = weight_BTK * gap_BTK
        return Signal(candidate_BTK.sum(-1), teacher.valid_BT, candidate_BTK)

    step = signal("gap", fn, needs=["scores.student.top", "scores.teacher.top"])
    return step if top_k is None else step._replace(candidates=frozenset({Candidates(support, top_k)}))


def from_teacher_known(*, view: str = "teacher") -> Step:
    """No direction, only where a teacher's opinion exists: opens the tokens of a divergence term.

    A batch without that view (a record that holds `kl` alone) counts as known all along.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        known_BT = batch.views[view].valid_BT & batch.mask_BT if view in batch.views else batch.mask_BT
        credit = replace(credit, known_BT=credit.known_BT | known_BT, gate_BT=credit.known_BT | known_BT)
        return credit.noting("known/share", known_BT.sum(), batch.mask_BT.sum()), state

    return Step("known", Phase.SIGNAL, Phase.SIGNAL, init=dict, apply=apply)
