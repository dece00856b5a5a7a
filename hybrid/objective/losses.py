"""Token losses: the only functions that see the student with gradients.

Each masks its own input before any `exp`, for padding may hold -inf, and 0 times inf is nan in the gradient.
Three kinds of loss exist, after the three sums of design section 3: policy (S(ratio, A)), divergence (c * D) and
likelihood (NLL). k1 is no loss here: its expected gradient is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.errors import MissingMeasurement

Support = Literal["full", "student", "teacher", "union"]
"""Tokens that a divergence looks at: the vocabulary, the most likely ones of a side, or those of both."""

LOG_RATIO_LIMIT = 20.0
"""Bound on |log ratio| before it is exponentiated, as in verl's core_algos."""


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy-gradient surrogate of PPO.

        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and >= dual_clip * A where A < 0

    Attributes:
      clip_low: how far below 1 the ratio may count.
      clip_high: how far above.
      dual_clip: bound on the ratio for negative advantages (arXiv 1912.09729); None for none.
      level: "token", or "sequence" for the length-normalised ratio of GSPO (arXiv 2507.18071).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    level: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class Divergence:
    """A divergence between the student's and the teacher's next-token distributions, with gradient to the student.

    Attributes:
      kind: "reverse_kl" KL(student || teacher), "forward_kl" KL(teacher || student), or "jsd", the generalised
        Jensen-Shannon divergence with the mixture beta * teacher + (1 - beta) * student; see
        `hybrid.objective.divergence`.
      support: "full" vocabulary, or the "student" / "teacher" top-k or the "union" of both, with one bucket for the
        tail.
      top_k: size of a top-k support.
      beta: weight of the teacher in the mixture of "jsd".
      temperature: at which both distributions are taken.
      view: which scorer.
    """

    kind: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    support: Support = "full"
    top_k: int = 64
    beta: float = 0.5
    temperature: float = 1.0
    view: str = "teacher"


@dataclass(frozen=True)
class SampledDivergence:
    """A divergence estimated from the sampled token alone: k2 = (lp - lpT)^2 / 2, k3 = exp(lpT - lp) - (lpT - lp) - 1.

    Reference:
      J. Schulman, Approximating KL divergence (2020). k2 has the gradient of the reverse KL on-policy; k3's descends
      the forward KL.
    """

    estimator: Literal["k2", "k3"] = "k2"
    view: str = "teacher"


@dataclass(frozen=True)
class Likelihood:
    """-log p of each token of the row's stored demonstration (supervised fine-tuning inside the objective).

    Attributes:
      branch: only prompts with a row in this branch of the term's route; None takes every branch.
      normaliser: "prompt_mean", a token mean within each text and a mean over texts; or "pooled", one token mean over
        the texts and the responses that the term's credit counts.
      as_policy: -ratio instead of -log p: off-policy RL with the advantage 1, whose gradient is the same at ratio 1.
    """

    branch: str | None = None
    normaliser: Literal["prompt_mean", "pooled"] = "prompt_mean"
    as_policy: bool = False


TokenLoss = PolicyLoss | Divergence | SampledDivergence | Likelihood


@dataclass(frozen=True, kw_only=True)
class StudentPass:
    """The student's current answers, with gradient.

    Attributes:
      logprob_BT: log-probs of the sampled tokens.
      candidate_logprob_BTK: log-probs of the student's rollout-time top-k candidates.
      divergence_BT: value per token of each divergence that the objective asks for.
      demonstration_logprob_BU: log-probs of the demonstration tokens.
    """

    logprob_BT: Float[Tensor, "B T"]
    candidate_logprob_BTK: Float[Tensor, "B T K"] | None = None
    divergence_BT: Mapping[Divergence, Float[Tensor, "B T"]] = field(default_factory=dict)
    demonstration_logprob_BU: Float[Tensor, "B U"] | None = None


def surrogate(advantage: Float[Tensor, "*s"], ratio: Float[Tensor, "*s"], loss: PolicyLoss) -> Float[Tensor, "*s"]:
    """The clipped surrogate of `PolicyLoss` for given ratios; at ratio 1 its gradient is -advantage * grad log p."""
    clipped_ratio = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    value = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
    if loss.dual_clip is None:
        return value
    return torch.where(advantage < 0, torch.minimum(value, -loss.dual_clip * advantage), value)


def log_ratio(logprob: Float[Tensor, "*s"], old_logprob: Float[Tensor, "*s"], live: Tensor) -> Float[Tensor, "*s"]:
    """The log-ratio logprob - old_logprob, exactly 0 (no gradient) where `live` is False."""
    return logprob.masked_fill(~live, 0) - old_logprob.masked_fill(~live, 0)


def bounded_exp(exponent: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The exponential of a number that is brought within +-20 first."""
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_token_loss(
    loss: PolicyLoss,
    advantage_BT: Float[Tensor, "B T"],
    logprob_BT: Float[Tensor, "B T"],
    old_logprob_BT: Float[Tensor, "B T"],
    mask_BT: Tensor,
) -> Float[Tensor, "B T"]:
    """The surrogate per token; with level "sequence" the ratio is exp of the response's mean log-ratio."""
    log_ratio_BT = log_ratio(logprob_BT, old_logprob_BT, mask_BT)
    if loss.level == "sequence":
        mean_B1 = log_ratio_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    return surrogate(advantage_BT, bounded_exp(log_ratio_BT), loss)


def likelihood_token_loss(
    loss: Likelihood, logprob_BU: Float[Tensor, "B U"], live_BU: Bool[Tensor, "B U"]
) -> Float[Tensor, "B U"]:
    """-log p of each live token, or -p / sg[p] with `as_policy`; 0 elsewhere."""
    logprob_BU = logprob_BU.masked_fill(~live_BU, 0)
    if loss.as_policy:
        return -(logprob_BU - logprob_BU.detach()).exp().masked_fill(~live_BU, 0)
    return -logprob_BU


def sampled_divergence(
    loss: SampledDivergence, logprob_BT: Float[Tensor, "B T"], teacher_logprob_BT: Float[Tensor, "B T"], live_BT: Tensor
) -> Float[Tensor, "B T"]:
    """k2 or k3 per token; 0 where `live_BT` is False."""
    gap_BT = log_ratio(teacher_logprob_BT, logprob_BT, live_BT)
    if loss.estimator == "k2":
        return gap_BT**2 / 2
    # Far above the teacher the exact value is finite; far below it the exponential would overflow.
    return bounded_exp(gap_BT) - gap_BT.clamp(max=LOG_RATIO_LIMIT) - 1


def need_divergence(student: StudentPass, loss: Divergence) -> Float[Tensor, "B T"]:
    """The measured divergence; raises `MissingMeasurement` where the run or record has none."""
    if loss not in student.divergence_BT:
        raise MissingMeasurement(
            f"the method needs the {loss.kind} between student and scores.{loss.view} on {loss.support} support "
            "(kl in a record), which this run does not measure"
        )
    return student.divergence_BT[loss]
