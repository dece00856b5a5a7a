"""On-policy distillation with verifiable reward: distils only where outcome and teacher agree.

Differs from the paper: the paper writes a sum over tokens; the authors' code, and our default, take the token mean.
The paper does not say what becomes of truncated responses; `as_wrong` is what their code's verifier does. For GRPD
the paper's formula (variant sign) and the authors' code (variant code, the default) are two methods; the published
script divides by the deviation, which the README says the paper does not, and so neither do we by default. A bound on
r, and u, are ours. `vanilla_opd` opens the gate for truncated responses, in uniform groups too; GRPD's variant code
still weighs them by |a| + u. In top-k mode the candidate sets are those of thunlp/OPD without the symmetric difference;
a token whose sides have no candidate in common trains nothing and counts in the denominator, as there.
`candidate_weight: none` is a weight of 1, as their README says; their code divides it by the number of candidates.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.gates import Truncated, keep_outcome_agreeing
from hybrid.objective.groups import Scale
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import Reduction, response_mean, token_mean, token_sum
from hybrid.objective.row_gates import drop_truncated
from hybrid.objective.signals import CandidateWeight, from_candidate_gap, from_teacher_gap
from hybrid.objective.step import CandidateSupport, Step, chain
from hybrid.objective.weights import weight_by_advantage_size

REDUCTIONS = {"token_mean": token_mean, "token_sum": token_sum, "response_mean": response_mean}


class Opdvr(MethodConfig):
    """Distils only where outcome and teacher agree. The defaults are the published script's."""

    formula: ClassVar[str] = (
        "r[i,t] = log pT - log pS;  z[i] = +1 if R[i] > thr else -1;  A[i,t] = z[i] * ReLU(z[i] * r[i,t])"
    )
    paper: ClassVar[str] = "On-policy distillation with verifiable reward (arXiv 2608.24696)"

    sources: ClassVar[Mapping[str, str]] = {
        "thr": "LeapLabTHU/OPDVR, opdvr.sh and the authors' trainer",
        "inverse": "LeapLabTHU/OPDVR, ablation_inverse_gated.sh",
        "truncated": "ours; vanilla_opd as in R2-OPD (arXiv 2609.35517)",
        "ratio_clip": "ours: r is unbounded in the paper",
        "top_k": "thunlp/OPD, LOG_PROB_TOP_K; 64 in the paper's top-k baseline",
        "support": "thunlp/OPD, TOP_K_STRATEGY: only_stu",
        "candidate_weight": "thunlp/OPD, the authors' base framework",
        "reduction": "token_mean: opdvr.sh; token_sum: the paper",
        "clip_low": "thunlp/OPD, the authors' base framework",
        "clip_high": "thunlp/OPD, the authors' base framework",
        "dual_clip": "thunlp/OPD, the authors' base framework",
    }

    name: Literal["opdvr"] = "opdvr"
    thr: float = Field(default=0.0, description="A reward above it is a right answer.")
    inverse: bool = Field(default=False, description="The ablation: keeps what outcome and teacher disagree on.")
    truncated: Truncated = Field(
        default="as_wrong",
        description="Responses at the length limit: judged, left out of numerator and denominator, or plain OPD.",
    )
    ratio_clip: float | None = Field(default=None, gt=0, description="Bound on |r| in nats; none in the paper.")
    top_k: int = Field(default=0, ge=0, description="Size of a side's candidate list; 0 is the sampled token.")
    support: CandidateSupport = Field(
        default="student",
        description="Whose top_k the candidates are: the student's, the teacher's, what is in both, or all of either.",
    )
    candidate_weight: CandidateWeight = Field(
        default="student_p",
        description="Probabilities, renormalised over the candidates, as their weights in top-k mode; none: each 1.",
    )
    reduction: Literal["token_mean", "token_sum", "response_mean"] = Field(
        default="token_mean", description="token_mean as the code, token_sum as the paper writes it."
    )
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages.")

    @override
    def build(self) -> Objective:
        gap = (
            from_candidate_gap(
                top_k=self.top_k, weighting=self.candidate_weight, clip=self.ratio_clip, support=self.support
            )
            if self.top_k
            else from_teacher_gap(clip=self.ratio_clip)
        )
        return objective(
            name=self.name,
            credit=chain(gap, *self.gates()),
            loss=PolicyLoss(self.clip_low, self.clip_high, self.dual_clip),
            reduction=self.reduce(),
        )

    def gates(self) -> tuple[Step, ...]:
        """The outcome gate; GRPD adds to it."""
        return self.outcome_gates("outcome")

    def outcome_gates(self, sign: Literal["outcome", "advantage"]) -> tuple[Step, ...]:
        """The gate with its sign, and before it what becomes of truncated responses."""
        free = self.truncated == "vanilla_opd"
        gate = keep_outcome_agreeing(thr=self.thr, inverse=self.inverse, free_truncated=free, sign=sign)
        return (drop_truncated(), gate) if self.truncated == "skip" else (gate,)

    def reduce(self) -> Reduction:
        """The reduction that the settings name."""
        return REDUCTIONS[self.reduction]()


class Grpd(Opdvr):
    """OPDVR's gate times the size of the group-relative advantage of correctness, or its sign alone."""

    formula: ClassVar[str] = (
        "code: A[i,t] = z[i] ReLU(z[i] r[i,t]) * (|a[i]| + u), a = correctness minus group mean [/ (std + 1e-6)];  "
        "sign: A[i,t] = s ReLU(s r[i,t]), s = sign(a[i]), averaged 1/G 1/|o|"
    )
    min_generations: ClassVar[int] = 2

    sources: ClassVar[Mapping[str, str]] = {
        **Opdvr.sources,
        "grpd_variant": "code: the authors' trainer; sign: the paper",
        "norm_by_std": "README: false is the paper; grpd.sh ships true",
        "u": "the authors' trainer: 0",
    }

    name: Literal["grpd"] = "grpd"  # pyright: ignore[reportIncompatibleVariableOverride]
    grpd_variant: Literal["code", "sign"] = Field(
        default="code", description="The authors' code, or the paper's formula."
    )
    norm_by_std: bool = Field(default=False, description="Divide by the group's standard deviation (variant code).")
    u: float = Field(default=0.0, ge=0, description="Added to |a|, so that uniform groups may train (variant code).")

    @override
    def gates(self) -> tuple[Step, ...]:
        if self.grpd_variant == "sign":
            return self.outcome_gates("advantage")
        scale: Scale = "group" if self.norm_by_std else "none"
        return (*super().gates(), weight_by_advantage_size(thr=self.thr, scale=scale, eps=1e-6, u=self.u))

    @override
    def reduce(self) -> Reduction:
        return response_mean() if self.grpd_variant == "sign" else super().reduce()
