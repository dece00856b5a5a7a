"""A step turns credit into credit; `chain` puts steps in a row, `route` sends rows different ways.

A step is a pair of pure functions, after optax's GradientTransformation: `init()` makes its state, and
`apply(credit, batch, state)` returns the new credit and the new state. The state of a whole objective is one flat
dictionary, so that it can stand in a checkpoint and be read by a person.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import ConfigError, HybridError, check
from hybrid.types import Credit, RolloutBatch, State


class Phase(IntEnum):
    """Signals say which way, gates which tokens, weights how strongly."""

    SIGNAL = 0
    GATE = 1
    WEIGHT = 2


CandidateSupport = Literal["student", "teacher", "intersection", "union"]
"""Whose most likely tokens the candidates of a top-k signal are: one side's, those of both, or those of either."""


class Candidates(NamedTuple):
    """The tokens that a top-k signal looks at: so many most likely ones, and whose."""

    support: CandidateSupport
    top_k: int


class Step(NamedTuple):
    """One named step.

    Attributes:
      needs: the measurements it reads.
      branches: the names that `route` gave its ways.
      candidates: what its top-k signals look at.
    """

    name: str
    first: Phase
    last: Phase
    init: Callable[[], State]
    apply: Callable[[Credit, RolloutBatch, State], tuple[Credit, State]]
    needs: frozenset[str] = frozenset()
    branches: tuple[str, ...] = ()
    candidates: frozenset[Candidates] = frozenset()


class Signal(NamedTuple):
    """What a signal function returns: the value, and where it is known."""

    value_BT: Float[Tensor, "B T"]
    known_BT: Bool[Tensor, "B T"]
    candidate_BTK: Float[Tensor, "B T K"] | None = None


def _stateless(name: str, phase: Phase, needs: Sequence[str], fn: Callable[[Credit, RolloutBatch], Credit]) -> Step:
    return Step(
        name,
        phase,
        phase,
        init=dict,
        apply=lambda credit, batch, state: (fn(credit, batch), state),
        needs=frozenset(needs),
    )


def of_every_token(what: str, value: Tensor, batch: RolloutBatch) -> Tensor:
    """The value; refuses one that has not an entry for each token, and would spread over the wrong axis.

    Raises:
      HybridError: names the step and both shapes.
    """
    if value.shape != batch.mask_BT.shape:
        raise HybridError(
            f"{what}: its function gives one value for each token, of shape {tuple(batch.mask_BT.shape)} [responses, "
            f"tokens]; got {tuple(value.shape)}. A value for each response is value_B[:, None].expand_as(batch.mask_BT)"
        )
    return value


def add_signal(credit: Credit, batch: RolloutBatch, name: str, signal: Signal) -> Credit:
    """Adds a signal where it is known.

    Raises:
      HybridError: the signal is not finite on a token that counts.
    """
    of_every_token(f"signal {name!r}", signal.value_BT, batch)
    use_BT = of_every_token(f"signal {name!r}", signal.known_BT, batch) & batch.mask_BT
    check(signal.value_BT.isfinite() | ~use_BT, signal.value_BT, f"signal {name!r} must be finite where it is known")
    value_BT = signal.value_BT.detach().masked_fill(~use_BT, 0)
    known_BT = credit.known_BT | use_BT
    candidate_BTK = signal.candidate_BTK
    if candidate_BTK is not None:
        candidate_BTK = candidate_BTK.detach().masked_fill(~use_BT[..., None], 0)
    credit = replace(
        credit,
        signal_BT=credit.signal_BT + value_BT,
        known_BT=known_BT,
        gate_BT=known_BT & batch.mask_BT,
        candidate_BTK=candidate_BTK if candidate_BTK is not None else credit.candidate_BTK,
    )
    return credit.noting(f"{name}/mean", value_BT.sum(), use_BT.sum())


def signal(name: str, fn: Callable[[RolloutBatch], Signal], needs: Sequence[str]) -> Step:
    """A step that adds `fn(batch)` to the signal."""
    return _stateless(name, Phase.SIGNAL, needs, lambda c, b: add_signal(c, b, name, fn(b)))


def close_gate(credit: Credit, batch: RolloutBatch, name: str, keep_BT: Bool[Tensor, "B T"]) -> Credit:
    """Closes the gate where `keep_BT` is False and notes the share of known tokens that it leaves open."""
    gate_BT = credit.gate_BT & keep_BT
    known_BT = credit.known_BT & batch.mask_BT
    return replace(credit, gate_BT=gate_BT).noting(f"kept/{name}", gate_BT.sum(), known_BT.sum())


def gate(name: str, fn: Callable[[Credit, RolloutBatch], Bool[Tensor, "B T"]], needs: Sequence[str] = ()) -> Step:
    """A step that keeps the tokens where `fn(credit, batch)` is True."""

    def apply(credit: Credit, batch: RolloutBatch) -> Credit:
        return close_gate(credit, batch, name, of_every_token(f"gate {name!r}", fn(credit, batch), batch))

    return _stateless(name, Phase.GATE, needs, apply)


def weight(name: str, fn: Callable[[Credit, RolloutBatch], Float[Tensor, "B T"]], needs: Sequence[str] = ()) -> Step:
    """A step that multiplies the weight by `fn(credit, batch)`, which is never negative."""

    def apply(credit: Credit, batch: RolloutBatch) -> Credit:
        factor_BT = (
            of_every_token(f"weight {name!r}", fn(credit, batch), batch).detach().masked_fill(~credit.gate_BT, 0)
        )
        check((factor_BT >= 0) & factor_BT.isfinite(), factor_BT, f"weight {name!r} must be finite and >= 0")
        credit = replace(credit, weight_BT=credit.weight_BT * torch.where(credit.gate_BT, factor_BT, 1))
        return credit.noting(f"weight/{name}", factor_BT.sum(), credit.gate_BT.sum())

    return _stateless(name, Phase.WEIGHT, needs, apply)


def chain(*steps: Step) -> Step:
    """Runs steps in order: signals, then gates, then weights.

    Raises:
      ConfigError: no step, a wrong order, or two stateful steps of the same name.
    """
    if not steps:
        raise ConfigError("chain() needs at least one step")
    for before, after in pairwise(steps):
        if after.first < before.last:
            raise ConfigError(
                f"step {after.name!r} is a {after.first.name.lower()} and stands after {before.name!r}, "
                f"a {before.last.name.lower()}; the order is signals, gates, weights"
            )

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        for step in steps:
            credit, state = step.apply(credit, batch, state)
        return credit, state

    return Step(
        name=" | ".join(step.name for step in steps),
        first=steps[0].first,
        last=steps[-1].last,
        init=lambda: join_states(step.init() for step in steps),
        apply=apply,
        needs=frozenset().union(*(step.needs for step in steps)),
        branches=next((step.branches for step in steps if step.branches), ()),
        candidates=frozenset().union(*(step.candidates for step in steps)),
    )


def join_states(states: Iterable[State]) -> State:
    """One dictionary of all states; two of the same name cannot be told apart and are refused."""
    joined: State = {}
    for state in states:
        if twice := joined.keys() & state.keys():
            raise ConfigError(f"two steps keep a state called {sorted(twice)[0]!r}; give one of them another name")
        joined |= state
    return joined


def blank(batch: RolloutBatch) -> Credit:
    """The credit that a chain starts from: no signal, nothing known, everything open, weight 1."""
    zeros_BT = torch.zeros(batch.mask_BT.shape, dtype=batch.dtype, device=batch.mask_BT.device)
    return Credit(
        signal_BT=zeros_BT,
        known_BT=torch.zeros_like(batch.mask_BT),
        gate_BT=batch.mask_BT,
        weight_BT=torch.ones_like(zeros_BT),
        branch_B=torch.full_like(batch.group_B, -1),
    )


class RowTest(NamedTuple):
    """A named test on rows, e.g. `mixed`: True where the row goes down this branch."""

    name: str
    test: Callable[[RolloutBatch], Bool[Tensor, " B"]]
    needs: frozenset[str] = frozenset()


def route(*branches: tuple[RowTest, Step]) -> Step:
    """Gives each response the credit of the first branch whose test it passes; the rest trains nothing.

    A row that no branch takes stays in the denominator: it is a response like any other, with credit 0. A branch sees
    the tokens of its own rows alone (their groups whole), so its batch statistics are its own.
    """
    if not branches:
        raise ConfigError("route() needs at least one (test, step) pair")

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        out = replace(credit, known_BT=batch.mask_BT, gate_BT=torch.zeros_like(credit.gate_BT))
        free_B = torch.ones_like(batch.group_B, dtype=torch.bool)
        for index, (row_test, step) in enumerate(branches):
            rows_B = free_B & row_test.test(batch)
            own_batch = replace(batch, mask_BT=batch.mask_BT & rows_B[:, None])
            branch, state = step.apply(replace(credit, gate_BT=own_batch.mask_BT), own_batch, state)
            out = merge(out, branch, rows_B, index).noting(f"route/{row_test.name}", rows_B.sum(), rows_B.numel())
            free_B = free_B & ~rows_B
        return out, state

    return Step(
        name="route(" + ", ".join(f"{row_test.name}: {step.name}" for row_test, step in branches) + ")",
        first=Phase.SIGNAL,
        last=Phase.WEIGHT,
        init=lambda: join_states(step.init() for _, step in branches),
        apply=apply,
        needs=frozenset().union(*(step.needs | row_test.needs for row_test, step in branches)),
        branches=tuple(row_test.name for row_test, _ in branches),
        candidates=frozenset().union(*(step.candidates for _, step in branches)),
    )


def only(row_test: RowTest, step: Step) -> Step:
    """The step for the rows that pass a test; the rest trains nothing, and counts in the denominator as with `route`.

    Unlike a route of one branch it keeps the branches of the step that it wraps.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        rows_B = row_test.test(batch)
        own_batch = replace(batch, mask_BT=batch.mask_BT & rows_B[:, None])
        inner, state = step.apply(replace(credit, gate_BT=own_batch.mask_BT), own_batch, state)
        blank_rows = replace(credit, known_BT=batch.mask_BT, gate_BT=torch.zeros_like(credit.gate_BT))
        out = merge(blank_rows, inner, rows_B, 0).noting(f"only/{row_test.name}", rows_B.sum(), rows_B.numel())
        return replace(out, branch_B=inner.branch_B.masked_fill(~rows_B, -1)) if step.branches else out, state

    return step._replace(
        name=f"only({row_test.name}: {step.name})",
        first=Phase.SIGNAL,
        last=Phase.WEIGHT,
        apply=apply,
        needs=step.needs | row_test.needs,
        branches=step.branches or (row_test.name,),
    )


def merge(out: Credit, branch: Credit, rows_B: Bool[Tensor, " B"], index: int) -> Credit:
    """`out` with the rows of one branch put in."""
    rows_B1 = rows_B[:, None]
    candidate_BTK = out.candidate_BTK
    if branch.candidate_BTK is not None:
        base_BTK = torch.zeros_like(branch.candidate_BTK) if candidate_BTK is None else candidate_BTK
        candidate_BTK = torch.where(rows_B1[..., None], branch.candidate_BTK, base_BTK)
    return replace(
        out,
        signal_BT=torch.where(rows_B1, branch.signal_BT, out.signal_BT),
        candidate_BTK=candidate_BTK,
        known_BT=torch.where(rows_B1, branch.known_BT, out.known_BT),
        gate_BT=torch.where(rows_B1, branch.gate_BT, out.gate_BT),
        weight_BT=torch.where(rows_B1, branch.weight_BT, out.weight_BT),
        branch_B=torch.where(rows_B, index, out.branch_B),
        metrics={**out.metrics, **branch.metrics},
    )
