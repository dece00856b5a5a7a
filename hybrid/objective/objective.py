"""An objective: terms, each with its own credit, loss, reduction and scale.

    L = sum_j scale_j * sum_bt share_j[b, t] * loss_j[b, t]

Credit is assigned once per generation batch, on complete groups and without gradients; the loss then runs over
micro-batches, whose losses simply add up because the shares were counted over the whole batch beforehand.
`mix((1.0, a), (0.5, b))` of objectives is again an objective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.objective.losses import (
    Divergence,
    Likelihood,
    PolicyLoss,
    SampledDivergence,
    StudentPass,
    TokenLoss,
    bounded_exp,
    likelihood_token_loss,
    log_ratio,
    need_divergence,
    policy_token_loss,
    sampled_divergence,
    surrogate,
)
from hybrid.objective.reductions import Reduction, carrying_rows, counted, spread
from hybrid.objective.schedules import Scale, at
from hybrid.objective.step import Candidates, Step, blank, join_states
from hybrid.types import Credit, Metric, RolloutBatch, State, known_measurement

Kind = Literal["policy", "kl", "sft"]


@dataclass(frozen=True)
class Term:
    """One summand.

    Attributes:
      name: of the method it came from; metrics and state keys of a mixture begin with it.
      credit: chain or route of steps.
      loss: what is trained with that credit.
      reduction: how token losses become one number.
      scale: product of numbers and schedules; may be negative.
    """

    name: str
    credit: Step
    loss: TokenLoss
    reduction: Reduction
    scale: tuple[Scale, ...] = ()

    @property
    def kind(self) -> Kind:
        """Which of the three sums of design section 3 the term belongs to."""
        if isinstance(self.loss, PolicyLoss):
            return "policy"
        return "sft" if isinstance(self.loss, Likelihood) else "kl"

    @property
    def needs(self) -> frozenset[str]:
        """Measurements of its steps and its loss."""
        return self.credit.needs | loss_needs(self.loss)

    def scale_at(self, step: int) -> float:
        """The product of its scales before update `step`."""
        value = 1.0
        for number in self.scale:
            value *= at(number, step)
        return value


@dataclass(frozen=True, kw_only=True)
class TermCredit:
    """What one term does with each token, on the whole batch or on some of its rows.

    Attributes:
      value_BT: the advantage A of a policy term, the coefficient c of the others; before reduction and scale.
      candidate_BTK: the advantage of each candidate, where the signal is a top-k one.
      share_BT: scale * share of the reduction; the demonstration's [B, U] share for a likelihood term.
      kept_BT: True where the token trains.
      scale: the scale before this update.
      branch_B: index of the route branch; -1 for none.
    """

    value_BT: Float[Tensor, "B T"]
    candidate_BTK: Float[Tensor, "B T K"] | None = None
    share_BT: Float[Tensor, "B S"]
    kept_BT: Bool[Tensor, "B T"]
    scale: float
    branch_B: Int[Tensor, " B"]


@dataclass(frozen=True)
class Assignment:
    """The credit of every term, and what was noted on the way: name -> (sum, count)."""

    terms: tuple[TermCredit, ...]
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """The three sums of the objective; differentiable."""

    policy: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    sft: Float[Tensor, ""]

    @property
    def total(self) -> Float[Tensor, ""]:
        """The number that is trained: policy + kl + sft."""
        return self.policy + self.kl + self.sft


@dataclass(frozen=True)
class Objective:
    """A sum of terms. Make one with `objective(...)`, mix several with `mix(...)`."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        """Refuses a step or loss that needs what there is no measurement of."""
        for name in sorted(self.needs):
            known_measurement(name)

    @property
    def needs(self) -> frozenset[str]:
        """Every measurement that some term reads."""
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The divergences that the student pass must measure."""
        return tuple(dict.fromkeys(t.loss for t in self.terms if isinstance(t.loss, Divergence)))

    @property
    def candidates(self) -> frozenset[Candidates]:
        """What its top-k signals look at."""
        return frozenset().union(*(term.credit.candidates for term in self.terms))

    def init(self) -> State:
        """The state before the first update; empty for stateless methods."""
        return join_states(self._named(term, term.credit.init()) for term in self.terms)

    @torch.no_grad()
    def assign(self, batch: RolloutBatch, state: State) -> tuple[Assignment, State]:
        """Credit for every token of the whole generation batch, and the state after it.

        Args:
          batch: complete groups; every rank passes the same gathered batch.
          state: from `init()`, the last call, or a checkpoint.

        Raises:
          MissingMeasurement: the batch lacks what a step reads.
        """
        credits, new_state, metrics = [], dict(state), {}
        for term in self.terms:
            own = {key.removeprefix(self._prefix(term)): value for key, value in state.items()}
            own = {key: value for key, value in own.items() if key in term.credit.init()}
            credit, own = term.credit.apply(blank(batch), batch, own)
            new_state |= self._named(term, own)
            metrics |= {self._prefix(term) + key: value for key, value in credit.metrics.items()}
            credits.append(term_credit(term, credit, batch))
        assignment = Assignment(tuple(credits), metrics)
        return replace(assignment, metrics=metrics | credit_of_outcomes(assignment, self, batch)), new_state

    def loss(self, assignment: Assignment, batch: RolloutBatch, student: StudentPass) -> Loss:
        """The loss of some rows, given their share of an assignment; sums over micro-batches to the whole."""
        zero = student.logprob_BT.masked_fill(~batch.mask_BT, 0).sum() * 0
        sums = {"policy": zero, "kl": zero, "sft": zero}
        for term, credit in zip(self.terms, assignment.terms, strict=True):
            sums[term.kind] = sums[term.kind] + term_loss(term, credit, batch, student)
        return Loss(**sums)

    def _prefix(self, term: Term) -> str:
        return f"{term.name}/" if len({t.name for t in self.terms}) > 1 else ""

    def _named(self, term: Term, state: State) -> State:
        return {self._prefix(term) + key: value for key, value in state.items()}


def loss_needs(loss: TokenLoss) -> frozenset[str]:
    """The measurements that a loss reads, beside those of its credit."""
    if isinstance(loss, PolicyLoss):
        return frozenset({"student_logprobs"})
    if isinstance(loss, Likelihood):
        return frozenset({"demonstration"})
    if isinstance(loss, SampledDivergence):
        return frozenset({f"scores.{loss.view}", "student_logprobs"})
    if loss.kind == "reverse_kl":
        return frozenset({"kl"})
    return frozenset({"scores.student.top", f"scores.{loss.view}.top"})


def term_credit(term: Term, credit: Credit, batch: RolloutBatch) -> TermCredit:
    """A chain's result in the form that the loss needs."""
    coefficient_BT = credit.coefficient_BT
    is_policy = term.kind == "policy"
    candidate_BTK = credit.candidate_BTK
    if candidate_BTK is not None:
        candidate_BTK = candidate_BTK * coefficient_BT[..., None]
    scale = term.scale_at(batch.step)
    if isinstance(term.loss, Likelihood):
        share = demonstration_share(term.loss, term.credit.branches, credit, batch)
    else:
        share = term.reduction.share(credit, batch)
    return TermCredit(
        value_BT=credit.signal_BT * coefficient_BT if is_policy else coefficient_BT,
        candidate_BTK=candidate_BTK,
        share_BT=scale * share,
        kept_BT=credit.gate_BT & batch.mask_BT,
        scale=scale,
        branch_B=credit.branch_B,
    )


def demonstration_share(loss: Likelihood, branches: tuple[str, ...], credit: Credit, batch: RolloutBatch) -> Tensor:
    """What each demonstration token counts, [B, U]; the first row of a prompt that owns a text carries it.

    Token-mean within a text and mean over the prompts that own one, or one token mean with the responses; both
    normalisations of RSTG, Eq. 14 (arXiv 2608.00782), are RECONSTRUCTED.
    """
    live_BU = batch.texts().mask_BU & carrying_rows(loss.branch, branches, credit, batch)[:, None]
    if loss.normaliser == "pooled":
        return spread(live_BU, counted(credit, batch).sum() + live_BU.sum(), batch.dtype)
    length_B1 = live_BU.sum(-1, keepdim=True).clamp(min=1)
    return spread(live_BU, length_B1 * live_BU.any(-1).sum().clamp(min=1), batch.dtype)


def term_loss(term: Term, credit: TermCredit, batch: RolloutBatch, student: StudentPass) -> Float[Tensor, ""]:
    """One term: the sum of share * token loss over the given rows; 0 that can go backward where nothing is kept."""
    if isinstance(term.loss, Likelihood):
        assert student.demonstration_logprob_BU is not None, "the caller runs the demonstrations"
        loss_BU = likelihood_token_loss(term.loss, student.demonstration_logprob_BU, credit.share_BT != 0)
        return (loss_BU * credit.share_BT).sum()
    return (token_loss(term, credit, batch, student).masked_fill(~batch.mask_BT, 0) * credit.share_BT).sum()


def token_loss(term: Term, credit: TermCredit, batch: RolloutBatch, student: StudentPass) -> Float[Tensor, "B T"]:
    """The loss of each token before the reduction: the surrogate, or c times the divergence."""
    loss = term.loss
    if isinstance(loss, PolicyLoss):
        if credit.candidate_BTK is not None:
            return candidate_token_loss(loss, credit.candidate_BTK, batch, student)
        old_BT = batch.need("student_logprobs").detach()
        return policy_token_loss(loss, credit.value_BT, student.logprob_BT, old_BT, batch.mask_BT)
    live_BT = credit.kept_BT
    if isinstance(loss, SampledDivergence):
        teacher_BT = batch.view(loss.view).logprob_BT.detach()
        value_BT = sampled_divergence(loss, student.logprob_BT, teacher_BT, live_BT)
    else:
        assert isinstance(loss, Divergence)
        value_BT = need_divergence(student, loss).masked_fill(~live_BT, 0)
    return credit.value_BT * value_BT


def candidate_token_loss(
    loss: PolicyLoss, candidate_BTK: Float[Tensor, "B T K"], batch: RolloutBatch, student: StudentPass
) -> Float[Tensor, "B T"]:
    """The surrogate of each candidate with its own ratio, summed over the candidates."""
    old_BTK = batch.view("student").top_logprob_BTK
    assert old_BTK is not None
    assert student.candidate_logprob_BTK is not None
    live_BTK = (candidate_BTK != 0) & batch.mask_BT[..., None]
    ratio_BTK = bounded_exp(log_ratio(student.candidate_logprob_BTK, old_BTK.detach(), live_BTK))
    return surrogate(candidate_BTK, ratio_BTK, loss).sum(-1)


def objective(*, name: str, credit: Step, loss: TokenLoss, reduction: Reduction) -> Objective:
    """An objective of one term."""
    return Objective((Term(name, credit, loss, reduction),))


def mix(*weighted: tuple[Scale, Objective]) -> Objective:
    """A weighted sum, `mix((1.0, grpo), (0.5, opd))`; each term keeps its own credit, mask, denominator and state.

    Raises:
      ConfigError: nothing to mix, or two terms of the same name keep a state.
    """
    if not weighted:
        raise ConfigError("mix() needs at least one (weight, objective) pair")
    terms = tuple(replace(t, scale=(number, *t.scale)) for number, part in weighted for t in part.terms)
    mixed = Objective(terms)
    mixed.init()
    return mixed


RIGHT_ABOVE = 0.5
"""A reward above it is a right answer in `credit/right` and `credit/wrong`; outcomes lie in [0, 1]."""


def credit_of_outcomes(assignment: Assignment, objective: Objective, batch: RolloutBatch) -> dict[str, Metric]:
    """What a response token is given on average, right rows and wrong ones apart, as sums and counts.

        credit/right = mean of A[b, t] over response tokens of rows with r[b] > 1/2,  credit/wrong with r[b] <= 1/2

    The same of c is `credit/kl_right` and `credit/kl_wrong`. An unscored row is neither; tokens that a gate closes are
    counted.
    """
    if batch.reward_B is None:
        return {}
    found: dict[str, Metric] = {}
    sides = {"right": batch.reward_B > RIGHT_ABOVE, "wrong": batch.reward_B <= RIGHT_ABOVE}
    kinds = [term.kind for term in objective.terms]
    prefixes: dict[Kind, str] = {"policy": "credit/", "kl": "credit/kl_"}
    for kind, prefix in prefixes.items():
        if kind not in kinds:
            continue
        value_BT = values(assignment, objective, (kind,)).masked_fill(~batch.mask_BT, 0)
        for side, rows_B in sides.items():
            found[prefix + side] = (float(value_BT[rows_B].sum()), float(batch.mask_BT[rows_B].sum()))
    return found


def values(assignment: Assignment, objective: Objective, kinds: tuple[Kind, ...]) -> Float[Tensor, "B T"]:
    """The sum of scale * value over the terms of the given kinds: A for "policy", c for "kl"."""
    total_BT = torch.zeros_like(assignment.terms[0].value_BT)
    for term, credit in zip(objective.terms, assignment.terms, strict=True):
        if term.kind in kinds:
            total_BT = total_BT + credit.scale * credit.value_BT
    return total_BT
