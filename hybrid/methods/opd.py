"""On-policy distillation: the student learns from the teacher's opinion of the student's own text.

Differs from GKD: the student's text alone, no share of teacher text (mix it with `sft`); a top-k support has one
bucket for the tail, for a truncated sum is no divergence and may be negative. k1 is a reward and never a loss, the
divergences are losses and never rewards: the other way round their expected gradient is zero.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.losses import Divergence, PolicyLoss, SampledDivergence, TokenLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import Reduction, response_mean, token_mean
from hybrid.objective.signals import CandidateWeight, from_candidate_gap, from_teacher_gap, from_teacher_known
from hybrid.objective.step import CandidateSupport, Step, chain

Estimator = Literal["k1", "k2", "k3", "reverse_kl", "forward_kl", "jsd"]


class Opd(MethodConfig):
    """Pulls the student towards the teacher on the student's own text, with no reward.

    `estimator: k1` (the default) is a detached advantage; the others are losses with gradient to the student.
    """

    formula: ClassVar[str] = (
        "k1: A[i,t] = log pT - log pS;  k2: (log pS - log pT)^2 / 2;  k3: pT/pS - log(pT/pS) - 1;  "
        "reverse_kl: KL(pS || pT);  forward_kl: KL(pT || pS);  jsd: beta KL(pT || m) + (1 - beta) KL(pS || m)"
    )
    paper: ClassVar[str] = "GKD (arXiv 2306.13649); On-policy distillation, Thinking Machines (2025)"

    sources: ClassVar[Mapping[str, str]] = {
        "estimator": "k1: Thinking Machines (2025); k2, k3: Schulman (2020); the others: arXiv 2306.13649",
        "use": "ours: what has no expected gradient is refused",
        "top_k": "thunlp/OPD: 0 is the sampled token, 64 the usual support",
        "support": "thunlp/OPD, TOP_K_STRATEGY: only_stu",
        "candidate_weight": "thunlp/OPD: student_p",
        "beta": "arXiv 2306.13649, the generalised Jensen-Shannon divergence; 0.5 as in TRL",
        "temperature": "VA-OPD and TRL compare at 1",
        "ratio_clip": "ours; none there",
        "reduction": "k1: thunlp/OPD, token-mean; losses: VA-OPD's Eq. 1, a mean over responses of token means",
        "clip_low": "thunlp/OPD",
        "clip_high": "thunlp/OPD",
        "dual_clip": "thunlp/OPD",
    }

    name: Literal["opd"] = "opd"
    estimator: Estimator = Field(default="k1", description="How the divergence from the teacher is measured.")
    use: Literal["reward", "loss"] | None = Field(
        default=None, description="k1 is a reward, all others are losses; anything else is refused, with the reason."
    )
    top_k: int = Field(
        default=0, ge=0, description="Support: 0 is the sampled token (k1) or the full vocabulary (divergences)."
    )
    support: CandidateSupport = Field(
        default="student",
        description="Whose top_k: the student's, the teacher's, what is in both (k1 alone), or all of either.",
    )
    candidate_weight: CandidateWeight = Field(
        default="student_p", description="Weights of the candidates of k1 with top_k > 0."
    )
    beta: float = Field(default=0.5, gt=0, lt=1, description="The teacher's share in the mixture of jsd.")
    temperature: float = Field(default=1.0, gt=0, description="At which the distributions are compared.")
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |log pT - log pS| in nats, for k1.")
    reduction: Literal["token_mean", "response_mean"] | None = Field(
        default=None, description="How token losses are averaged; null is token_mean for k1, response_mean for losses."
    )
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count (k1).")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count (k1).")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages (k1).")

    @model_validator(mode="after")
    def _refuse_what_has_no_gradient(self) -> Self:
        if self.estimator == "k1" and self.use == "loss":
            raise ValueError(
                "k1 as a differentiable loss has an expected gradient of zero, so the teacher would have no effect; "
                "use: reward, or estimator: k2"
            )
        if self.estimator in ("reverse_kl", "forward_kl", "jsd") and self.use == "reward":
            raise ValueError(
                f"{self.estimator} does not depend on the sampled token, so as an advantage its expected gradient is "
                "zero; use: loss, or estimator: k1"
            )
        if self.estimator in ("k2", "k3") and self.use == "reward":
            raise ValueError(f"{self.estimator} is defined as a loss here; use: loss, or estimator: k1")
        return self

    @model_validator(mode="after")
    def _refuse_a_divergence_on_what_both_share(self) -> Self:
        is_divergence = self.estimator in ("reverse_kl", "forward_kl", "jsd")
        if is_divergence and self.top_k and self.support == "intersection":
            raise ValueError(
                f"{self.estimator} on the intersection would move what only one side holds likely, which is where the "
                "two differ, into the tail; use support: union, or estimator: k1"
            )
        return self

    @override
    def build(self) -> Objective:
        return objective(name=self.name, credit=chain(self.signal()), loss=self.loss(), reduction=self.reduce())

    def reduce(self) -> Reduction:
        """The reduction that the settings name, or the one that goes with the estimator."""
        name = self.reduction or ("token_mean" if self.estimator == "k1" else "response_mean")
        return token_mean() if name == "token_mean" else response_mean()

    def signal(self) -> Step:
        """The gap for k1; for the losses, only where the teacher is known."""
        if self.estimator != "k1":
            return from_teacher_known()
        if self.top_k:
            return from_candidate_gap(
                top_k=self.top_k, weighting=self.candidate_weight, clip=self.ratio_clip, support=self.support
            )
        return from_teacher_gap(clip=self.ratio_clip)

    def loss(self) -> TokenLoss:
        """What carries the gradient."""
        if self.estimator == "k1":
            return PolicyLoss(self.clip_low, self.clip_high, self.dual_clip)
        if self.estimator == "k2" or self.estimator == "k3":
            return SampledDivergence(self.estimator)
        support = self.support if self.top_k and self.support != "intersection" else "full"
        return Divergence(self.estimator, support, self.top_k or 64, self.beta, self.temperature)
