"""Evidence of a token from two contexts of one scorer, and how it enters the reward advantage (SIPO).

The scorer sees the right answer in one prompt and a wrong one in the other; what any answer in the prompt does to the
text cancels in the difference. Shape letters: C the seven buckets of the student's confidence.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.objective.groups import group_advantage, group_range
from hybrid.objective.schedules import Scale, at
from hybrid.objective.step import Phase, Signal, Step, add_signal
from hybrid.types import Credit, RolloutBatch, State

EvidenceKind = Literal["contrast", "opd"]
"""log p(y | right) - log p(y | wrong), or log p(y | right) - log pS(y), which is not a contrast."""

EvidenceBaseline = Literal["none", "confidence"]
"""What is taken off the evidence: nothing, or its running mean among tokens of like confidence."""

CONFIDENCE_EDGES = (-4.0, -2.0, -1.0, -0.5, -0.2, -0.05)
"""Upper ends, in nats of the student's log-prob, of all buckets but the last (SIPO's core_algos)."""

CONFIDENCE_RATE = 0.1
"""Weight of the new mean in a bucket's moving average (SIPO)."""

CONFIDENCE_MIN_TOKENS = 8
"""A bucket with fewer tokens in a batch keeps its mean (SIPO)."""

LOG_WEIGHT_LIMIT = 20.0
"""Bound on |evidence| before it is exponentiated, as in the authors' code; the clip to 1 +- eps follows anyway."""


class ConfidenceMeans(NamedTuple):
    """Mean evidence of each bucket, and whether it was ever measured."""

    mean_C: Float[Tensor, " C"]
    seen_C: Bool[Tensor, " C"]


def confidence_bucket(student_logprob_BT: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """0 .. 6: the bucket i with edge[i - 1] < log p <= edge[i]."""
    edges = torch.tensor(CONFIDENCE_EDGES, dtype=student_logprob_BT.dtype, device=student_logprob_BT.device)
    return torch.bucketize(student_logprob_BT, edges)


def confidence_means(
    evidence_BT: Float[Tensor, "B T"],
    student_logprob_BT: Float[Tensor, "B T"],
    use_BT: Bool[Tensor, "B T"],
    before: ConfidenceMeans,
) -> ConfidenceMeans:
    """The buckets' means after this batch: a first mean as it is, later ones by moving average.

        mean[c] <- (1 - 0.1) mean[c] + 0.1 * mean of the evidence in bucket c,     where c has >= 8 tokens

    Args:
      evidence_BT: evidence in nats.
      student_logprob_BT: the student's log-prob of the sampled token: its confidence.
      use_BT: tokens that have evidence.
      before: means of the batches before.

    Reference:
      SIPO, `_confidence_baseline` of core_algos.py (arXiv 2609.36742). Differs: once per batch, not per micro-batch.
    """
    bucket_N, evidence_N = confidence_bucket(student_logprob_BT[use_BT]), evidence_BT[use_BT]
    zeros_C = torch.zeros_like(before.mean_C, dtype=evidence_BT.dtype)
    count_C = zeros_C.index_add(0, bucket_N, torch.ones_like(evidence_N))
    new_C = zeros_C.index_add(0, bucket_N, evidence_N) / count_C.clamp(min=1)
    enough_C = count_C >= CONFIDENCE_MIN_TOKENS
    moved_C = (1 - CONFIDENCE_RATE) * before.mean_C + CONFIDENCE_RATE * new_C
    mean_C = torch.where(enough_C, torch.where(before.seen_C, moved_C, new_C), before.mean_C)
    return ConfidenceMeans(mean_C, before.seen_C | enough_C)


@dataclass(frozen=True)
class Evidence:
    """What the scorer says about a token, less a baseline; rows without a valid pair of contexts have none.

    Attributes:
      kind: the second side of the difference.
      baseline: what is taken off.
    """

    kind: EvidenceKind = "contrast"
    baseline: EvidenceBaseline = "none"

    @property
    def needs(self) -> frozenset[str]:
        """The measurements that are read."""
        other = "scores.wrong" if self.kind == "contrast" else "student_logprobs"
        return frozenset({"scores.right", other} | ({"student_logprobs"} if self.baseline == "confidence" else set()))

    def init(self) -> State:
        """No bucket was ever measured."""
        num_buckets = len(CONFIDENCE_EDGES) + 1
        empty: State = {"confidence_mean": [0.0] * num_buckets, "confidence_seen": [0.0] * num_buckets}
        return empty if self.baseline == "confidence" else {}

    def read(self, batch: RolloutBatch, state: State) -> tuple[Signal, State]:
        """The evidence, where it is known, and the state after this batch."""
        right = batch.view("right")
        if self.kind == "contrast":
            wrong = batch.view("wrong")
            other_BT, valid_BT = wrong.logprob_BT, right.valid_BT & wrong.valid_BT
        else:
            other_BT, valid_BT = batch.need("student_logprobs"), right.valid_BT
        use_BT = valid_BT & batch.mask_BT
        evidence_BT = (right.logprob_BT - other_BT).masked_fill(~use_BT, 0)
        if self.baseline == "none":
            return Signal(evidence_BT, use_BT), state
        logprob_BT = batch.need("student_logprobs")
        before = ConfidenceMeans(
            torch.tensor(state["confidence_mean"], dtype=evidence_BT.dtype, device=evidence_BT.device),
            torch.tensor(state["confidence_seen"], device=evidence_BT.device) > 0,
        )
        after = confidence_means(evidence_BT, logprob_BT, use_BT, before)
        base_BT = after.mean_C[confidence_bucket(logprob_BT)]
        state = {
            **state,
            "confidence_mean": after.mean_C.tolist(),
            "confidence_seen": after.seen_C.to(evidence_BT.dtype).tolist(),
        }
        return Signal((evidence_BT - base_BT).masked_fill(~use_BT, 0), use_BT), state


@dataclass(frozen=True)
class RewardAdvantage:
    """R - mean of the group, with an imputed value for groups that all failed.

    Attributes:
      thr: a reward of at least it is a success.
      impute: s; all-wrong rows get -s * c. 0 leaves them at 0.
    """

    thr: float = 0.5
    impute: float = 0.0

    def __call__(self, batch: RolloutBatch) -> Float[Tensor, " B"]:
        """The advantage of each response."""
        reward_B = batch.need("reward")
        advantage_B = group_advantage(reward_B, batch.group_B)
        if self.impute == 0:
            return advantage_B
        return imputed_advantage(advantage_B, reward_B, batch.group_B, thr=self.thr, s=self.impute)


def all_wrong_rows(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"], *, thr: float) -> Bool[Tensor, " B"]:
    """Scored rows of groups in which no scored response reached `thr`."""
    best_B, _ = group_range(reward_B, group_B)
    return (best_B < thr) & ~reward_B.isnan()


def imputed_advantage(
    advantage_B: Float[Tensor, " B"], reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"], *, thr: float, s: float
) -> Float[Tensor, " B"]:
    """Gives the responses of groups that all failed the advantage that failing usually has.

        A[i] = -s * c  in all-wrong groups,     c = batch mean of |A| over the wrong responses of mixed groups

    Args:
      advantage_B: group-relative reward advantage.
      reward_B: rewards; NaN is unscored and left alone.
      group_B: prompt of each response.
      thr: a reward of at least it is a success.
      s: the factor.

    Returns:
      The advantage; as it was where the batch has no mixed group.

    Reference:
      SIPO, `impute_group_advantage` of core_algos.py (arXiv 2609.36742). Differs: all-right groups are left alone.
    """
    best_B, _ = group_range(reward_B, group_B)
    wrong_in_mixed_B = (reward_B < thr) & (best_B >= thr)
    if not wrong_in_mixed_B.any():
        return advantage_B
    c = advantage_B[wrong_in_mixed_B].abs().mean()
    return torch.where(all_wrong_rows(reward_B, group_B, thr=thr), -s * c, advantage_B)


def from_reward_advantage(advantage: RewardAdvantage) -> Step:
    """The reward advantage of SIPO, the same for every token of a response; known for every response."""

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        value_BT = advantage(batch)[:, None].expand(batch.mask_BT.shape)
        return add_signal(credit, batch, "reward_advantage", Signal(value_BT, batch.mask_BT)), state

    return Step("reward_advantage", Phase.SIGNAL, Phase.SIGNAL, dict, apply, frozenset({"reward"}))


def from_context_contrast(
    *, kappa: float, eps: float, evidence: Evidence, negative_only: RewardAdvantage | None = None
) -> Step:
    """The evidence as a signal, kappa * clip(e, -eps, +eps): the additive form of SIPO.

    With `negative_only` it is 0 on the responses whose advantage of that kind is positive.
    """

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        signal, state = evidence.read(batch, state)
        value_BT = kappa * signal.value_BT.clamp(-eps, eps)
        if negative_only is not None:
            value_BT = value_BT * (negative_only(batch) <= 0)[:, None]
        at_clip = (signal.known_BT & (signal.value_BT.abs() >= eps)).sum()
        credit = add_signal(credit, batch, "contrast", Signal(value_BT, signal.known_BT))
        return credit.noting("contrast/at_clip", at_clip, signal.known_BT.sum()), state

    needs = evidence.needs | ({"reward"} if negative_only is not None else set())
    return Step("contrast", Phase.SIGNAL, Phase.SIGNAL, evidence.init, apply, needs)


def evidence_factor(
    evidence_BT: Float[Tensor, "B T"], sign_B: Float[Tensor, " B"], *, lam: float, eps: float
) -> Float[Tensor, "B T"]:
    """(1 - lam) + lam * clip(exp(sign(A_r) * e), 1 - eps, 1 + eps): always positive, 1 at e = 0.

    Reference:
      RLSD, Algorithm 1 (arXiv 2604.03128), as in SIPO's core_algos.py. Differs: nothing.
    """
    log_weight_BT = (sign_B[:, None] * evidence_BT).clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    return (1 - lam) + lam * log_weight_BT.exp().clamp(1 - eps, 1 + eps)


@dataclass(frozen=True)
class Multiplicative:
    """Settings of SIPO's multiplicative form.

    Attributes:
      lam: how much of the advantage the evidence may move; a schedule.
      eps: bound on the factor's distance from 1.
      all_wrong_kappa: adds kappa * clip(e, -eps, +eps) on all-wrong groups.
      negative_only: only rows with a negative advantage are moved.
    """

    lam: Scale
    eps: float
    all_wrong_kappa: float = 0.0
    negative_only: bool = False


def from_modulated_advantage(advantage: RewardAdvantage, evidence: Evidence, form: Multiplicative) -> Step:
    """A_r times a factor of the evidence; rows without evidence keep A_r. The multiplicative form of SIPO."""

    def apply(credit: Credit, batch: RolloutBatch, state: State) -> tuple[Credit, State]:
        signal, state = evidence.read(batch, state)
        advantage_B = advantage(batch)
        factor_BT = evidence_factor(signal.value_BT, advantage_B.sign(), lam=at(form.lam, batch.step), eps=form.eps)
        moved_BT = signal.known_BT & ((advantage_B < 0)[:, None] if form.negative_only else True)
        value_BT = advantage_B[:, None] * torch.where(moved_BT, factor_BT, 1)
        if form.all_wrong_kappa > 0:
            failed_B = all_wrong_rows(batch.need("reward"), batch.group_B, thr=advantage.thr)
            extra_BT = form.all_wrong_kappa * signal.value_BT.clamp(-form.eps, form.eps)
            value_BT = value_BT + extra_BT * (signal.known_BT & failed_B[:, None])
        return add_signal(credit, batch, "modulated_advantage", Signal(value_BT, batch.mask_BT)), state

    needs = evidence.needs | {"reward"}
    return Step("modulated_advantage", Phase.SIGNAL, Phase.SIGNAL, evidence.init, apply, needs)
