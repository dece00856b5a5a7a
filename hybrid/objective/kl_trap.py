"""The KL agreement trap: where a broken prefix makes the teacher agree with whatever follows, the rest is cut (KAT).

The same decision twice: `trap_cut` looks at complete responses, `online_stop` goes along while a response is generated,
one token at a time. Positions count the response's own tokens, so masked-out tokens (tool output) neither fill nor
break a window. Shape letter: W windows, each named by its last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import check
from hybrid.objective.losses import Divergence
from hybrid.objective.ranks import linear_quantile
from hybrid.objective.signals import teacher_gap
from hybrid.objective.step import Phase, Step, close_gate
from hybrid.types import Credit, RolloutBatch, State

Estimator = Literal["kl", "k1", "k3"]
"""What stands for the token's divergence: the measured reverse KL, or an estimate from the sampled token."""


@dataclass(frozen=True)
class Trap:
    """When a run of low divergence ends a response.

    Attributes:
      window: tokens per window.
      patience: low windows in a row that fire the trigger, C.
      n_exempt: a cut may not lie before this token.
      stride: tokens from one window to the next.
      min_keep: tokens that stay whatever happens.
      exempt_trigger: a run that began too early is "ignored" until a window breaks it, or its cut is "deferred" to
        token n_exempt, if the run still lasts there.
    """

    window: int = 64
    patience: int = 4
    n_exempt: int = 128
    stride: int = 1
    min_keep: int = 1
    exempt_trigger: Literal["ignored", "deferred"] = "ignored"


@dataclass(frozen=True)
class TrapState:
    """What the online stop remembers of one response.

    Attributes:
      recent: divergences of the last `window` tokens, oldest first.
      num_tokens: tokens seen.
      run: low windows in a row.
      run_start: first token of the first window of that run.
      lowest: smallest window mean so far; inf before the first window.
      cut: number of tokens to keep, once the trigger has fired.
    """

    recent: tuple[float, ...] = ()
    num_tokens: int = 0
    run: int = 0
    run_start: int = 0
    lowest: float = float("inf")
    cut: int | None = None


def online_stop(state: TrapState, d_t: float, *, trap: Trap, threshold: float) -> tuple[TrapState, bool]:
    """One token on: the new state, and whether generation should stop.

    Args:
      state: `TrapState()` at the first token; after it has fired, nothing changes any more.
      d_t: KL(student || teacher) at this token, in nats.
      trap: the settings.
      threshold: s_k; -inf never fires (before warm-up, or with too few samples).

    Returns:
      The state, whose `cut` says how many tokens to keep, and True from the token on that fires the trigger.

    Reference:
      KAT, online variant (arXiv 2606.09471). Time and memory per token do not grow with the response.
    """
    if state.cut is not None:
        return state, True
    recent = (*state.recent, d_t)[-trap.window :]
    num_tokens = state.num_tokens + 1
    state = replace(state, recent=recent, num_tokens=num_tokens)
    if num_tokens < trap.window or (num_tokens - trap.window) % trap.stride:
        return state, False
    mean, start = sum(recent) / trap.window, num_tokens - trap.window
    state = replace(state, lowest=min(state.lowest, mean))
    if not mean < threshold:
        return replace(state, run=0), False
    state = replace(state, run=state.run + 1, run_start=state.run_start if state.run else start)
    if state.run < trap.patience or not may_cut(state.run_start, num_tokens, trap):
        return state, False
    return replace(state, cut=cut_at(state.run_start, trap)), True


def may_cut(run_start: int, num_tokens: int, trap: Trap) -> bool:
    """True where a run of enough low windows may cut: it began past the exempt span, or it lasts past its end."""
    return run_start >= trap.n_exempt or (trap.exempt_trigger == "deferred" and num_tokens > trap.n_exempt)


def cut_at(run_start: int, trap: Trap) -> int:
    """Number of tokens to keep when the trigger fires for a run that began at token `run_start`."""
    return max(run_start, trap.n_exempt, trap.min_keep)


def window_means(value_T: Float[Tensor, " T"], window: int, stride: int = 1) -> Float[Tensor, " W"]:
    """The mean z: of each `window` neighbouring values, `stride` apart; none where there are fewer values."""
    if len(value_T) < window:
        return value_T.new_empty(0)
    return value_T.unfold(0, window, stride).sum(-1) / window


def trap_cut(value_T: Float[Tensor, " T"], *, trap: Trap, threshold: float) -> int:
    """How many tokens of a complete response stay.

        low[e] = z[e] < s;   fires at the first e that ends C low windows in a row;   cut = start of the first of them

    Args:
      value_T: divergence of each of the response's own tokens, in nats.
      trap: the settings.
      threshold: s_k.

    Returns:
      The cut; the length of the response where the trigger never fires.

    Reference:
      KAT (arXiv 2606.09471), trigger and roll-back; the exempt span's handling is RECONSTRUCTED.
    """
    low_W = (window_means(value_T, trap.window, trap.stride) < threshold).tolist()
    run, run_start = 0, 0
    for index, low in enumerate(low_W):
        run, run_start = (run + 1, run_start if run else index * trap.stride) if low else (0, 0)
        if run >= trap.patience and may_cut(run_start, index * trap.stride + trap.window, trap):
            return min(cut_at(run_start, trap), len(value_T))
    return len(value_T)


def trap_threshold(minima: Sequence[float], eta: float) -> float:
    """The threshold s: the (1 - eta)-quantile of past responses' smallest window means, with linear interpolation.

    A smaller eta means a higher threshold and more cutting.
    """
    return float(linear_quantile(torch.tensor(minima, dtype=torch.float64), 1 - eta))


def token_divergence(batch: RolloutBatch, estimator: Estimator) -> Float[Tensor, "B T"]:
    """What stands for d: the measured reverse KL, or k1 = -g or k3 = exp(g) - g - 1, with g = log pT - log pS.

    The estimates are noisy, and k1 may be negative; a run with them is not the paper's method.
    """
    if estimator == "kl":
        return batch.need("kl")
    gap_BT = teacher_gap(batch.view("teacher").logprob_BT, batch.need("student_logprobs"))
    return sampled_divergence(gap_BT, estimator)


def sampled_divergence(gap: Float[Tensor, "*s"], estimator: Estimator) -> Float[Tensor, "*s"]:
    """The estimate k1 or k3 of the reverse KL from the sampled token's gap, teacher minus student."""
    return -gap if estimator == "k1" else gap.exp() - gap - 1


@dataclass(frozen=True)
class TrapMemory:
    """How the threshold comes about.

    Attributes:
      eta: the threshold is the (1 - eta)-quantile of the remembered minima.
      buffer: number of responses that are remembered, the latest ones.
      min_samples: below this number nothing is cut.
      warmup_steps: updates before the first cut.
    """

    eta: float = 0.3
    buffer: int = 4096
    min_samples: int = 512
    warmup_steps: int = 50

    def threshold(self, minima: Sequence[float], step: int) -> float:
        """The threshold s for this batch; -inf, which never fires, while the method is not yet active."""
        if not minima or len(minima) < self.min_samples or step < self.warmup_steps:
            return float("-inf")
        return trap_threshold(minima, self.eta)


@dataclass(frozen=True)
class OnlineStop:
    """Ends responses while they are written, where the trap would cut them afterwards.

    A stopped response keeps its tokens up to the one that fired the trigger: the gate then finds the same cut in it,
    and its smallest window mean enters the memory.

    Attributes:
      trap: when a response ends.
      memory: how the threshold comes about.
      estimator: what stands for the token's divergence.
      divergence: the measured reverse KL; None where it is estimated.
      chunk: tokens between two looks; 0 is every token where the student generates in this process, and `ENGINE_CHUNK`
        where an engine does.
      required: whether a run that cannot stop online is refused, rather than masked afterwards.
    """

    trap: Trap
    memory: TrapMemory
    estimator: Estimator
    divergence: Divergence | None
    chunk: int = 0
    required: bool = False

    def threshold(self, state: State, step: int) -> float:
        """The threshold s that the gate will have for the batch of this step; -inf while nothing is cut."""
        return self.memory.threshold(state["kl_minima"], step)


ENGINE_CHUNK = 128
"""Tokens that an engine generates between two looks at them."""


def trap_keep(
    value_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"], *, trap: Trap, threshold: float
) -> tuple[Bool[Tensor, "B T"], list[float]]:
    """The tokens before each response's cut, and the smallest window mean of each response that has a window."""
    keep_BT, minima = use_BT.clone(), []
    for row, (value_T, use_T) in enumerate(zip(value_BT.double(), use_BT, strict=True)):
        own_T = value_T[use_T]
        cut = trap_cut(own_T, trap=trap, threshold=threshold)
        keep_BT[row] = use_T & (use_T.cumsum(0) <= cut)
        means_W = window_means(own_T, trap.window, trap.stride)
        if len(means_W):
            minima.append(float(means_W.min()))
    return keep_BT, minima


def keep_before_kl_trap(*, trap: Trap, memory: TrapMemory, estimator: Estimator = "kl") -> Step:
    """Keeps each response's tokens before its trap; the threshold comes from the responses of earlier batches.

    Every response of the batch, cut or not, then enters the memory with the minimum over its whole length.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        minima = state["kl_minima"]
        threshold = memory.threshold(minima, batch.step)
        use_BT = credit.known_BT & batch.mask_BT
        value_BT = token_divergence(batch, estimator).masked_fill(~use_BT, 0)
        check(value_BT.isfinite(), value_BT, "kl must be finite on response tokens")
        keep_BT, new_minima = trap_keep(value_BT, use_BT, trap=trap, threshold=threshold)
        cut_B = (use_BT & ~keep_BT).any(-1)
        credit = close_gate(credit, batch, "kl_trap", keep_BT).noting("kl_trap/cut", cut_B.sum(), len(cut_B))
        credit = credit.noting("kl_trap/estimated", float(estimator != "kl"), 1)
        if threshold > float("-inf"):
            credit = credit.noting("kl_trap/threshold", threshold, 1)
        return credit, {**state, "kl_minima": (minima + new_minima)[-memory.buffer :]}

    needs = {"kl"} if estimator == "kl" else {"scores.teacher", "student_logprobs"}
    return Step("kl_trap", Phase.GATE, Phase.GATE, lambda: {"kl_minima": []}, apply, frozenset(needs))
