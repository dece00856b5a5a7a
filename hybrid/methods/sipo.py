"""Self-instructing policy optimisation: the reward's advantage, shifted token by token by a contrast of two contexts.

The student itself, frozen every few steps, scores its own text once with the right answer in its prompt and once with a
wrong one. What both contexts share cancels; what is left says which tokens lead to the right answer.

Differs from the authors' code: one denominator over the whole batch instead of one per micro-batch; the schedule of
`lam` begins with update 0, there with 1; the token-level correction of sampler mismatch is the trainer's affair. Our
readings where the text leaves room: the confidence baseline has the batch itself in its means (a bucket's first mean is
that of its first batch with 8 tokens); `all_wrong_kappa` adds to the scored responses of every group in which none
reaches `thr`, without the sign guard, which is the additive form's; `impute_group_advantage` changes nothing in a batch
without a mixed group.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import MethodConfig, ViewSpec
from hybrid.objective.contrast import (
    Evidence,
    EvidenceBaseline,
    EvidenceKind,
    Multiplicative,
    RewardAdvantage,
    from_context_contrast,
    from_modulated_advantage,
    from_reward_advantage,
)
from hybrid.objective.gates import keep_agreeing_with_reward
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.step import Step, chain

ContrastContext = Literal["answer", "trajectory", "auto"]
"""What the right and the wrong context hold: a final answer, a sibling's response, or whichever there is."""


class Sipo(MethodConfig):
    """Adds a clipped right-answer / wrong-answer contrast to the reward advantage, never against its sign."""

    formula: ClassVar[str] = (
        "e[i,t] = log p(y | right) - log p(y | wrong);  A_r[i] = R[i] - mean_g R;  "
        "additive: A = A_r + kappa clip(e, +-eps) h[i], max(A, 0) where A_r > 0, min(A, 0) where A_r < 0;  "
        "multiplicative: A = A_r ((1 - lam) + lam clip(exp(sign(A_r) e), 1 - eps, 1 + eps))"
    )
    paper: ClassVar[str] = "Self-instructing policy optimization (arXiv 2609.36742)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "form": "README of Yueeeeeeee/SIPO; multiplicative is the default of its generic config, not of its recipes",
        "kappa": "README: 0.5 for math; 0.15 for science, tools and code",
        "eps": "README",
        "evidence": "README; opd is the default of its generic config (RLSD, arXiv 2604.03128)",
        "baseline": "core_algos.py: seven buckets, moving average 0.1, at least 8 tokens",
        "negative_only": "core_algos.py",
        "lam": "core_algos.py: 0.5",
        "lam_steps": "core_algos.py: 50",
        "all_wrong_kappa": "core_algos.py",
        "impute_group_advantage": "core_algos.py, `impute_wrong_scale`",
        "thr": "run_sipo_reinforce_adv.sh: success threshold 0.5",
        "contrast_context": "README: answer for math and tools, auto for science, trajectory for code",
        "negative": "core_algos.py",
        "unjudged": "core_algos.py",
        "sync_every": "run_sipo_reinforce_adv.sh",
        "clip_low": "user.yaml",
        "clip_high": "user.yaml",
        "dual_clip": "core_algos.py",
    }

    name: Literal["sipo"] = "sipo"
    form: Literal["additive", "multiplicative"] = Field(
        default="additive", description="How the evidence enters the advantage."
    )
    kappa: float = Field(default=0.5, ge=0, description="Factor of the clipped evidence (additive).")
    eps: float = Field(
        default=0.2, gt=0, lt=1, description="Bound on the evidence in nats, or on the factor's way from 1."
    )
    evidence: EvidenceKind = Field(
        default="contrast",
        description="Right against wrong context, or right context against the student (multiplicative only).",
    )
    baseline: EvidenceBaseline = Field(
        default="none", description="Takes the evidence's running mean among tokens of like student confidence off it."
    )
    negative_only: bool = Field(
        default=False, description="Evidence only where A_r <= 0 (additive) or A_r < 0 (multiplicative)."
    )
    lam: float = Field(
        default=0.5, ge=0, le=1, description="Share of the advantage that evidence may move (multiplicative)."
    )
    lam_steps: int = Field(default=50, ge=1, description="lam * max(0, 1 - k / lam_steps) before update k.")
    all_wrong_kappa: float = Field(
        default=0.0, ge=0, description="Adds kappa * clip(e) on all-wrong groups (multiplicative only; 0 is off)."
    )
    impute_group_advantage: float = Field(
        default=0.0,
        ge=0,
        description="s: all-wrong rows get -s * (mean |A_r| of wrong rows in mixed groups); 0 is off.",
    )
    contrast_context: ContrastContext = Field(
        default="answer",
        description="What the contexts hold: an answer (math, tools), a sibling's whole response (code), or (auto, for "
        "science) siblings where both kinds exist and answers elsewhere.",
    )
    negative: Literal["own", "mode"] = Field(
        default="own",
        description="The wrong answer of a wrong response: its own, or the commonest wrong one of its group.",
    )
    unjudged: Literal["skip", "mode"] = Field(
        default="skip",
        description="A wrong response without a judged answer: no contrast, or its group's commonest wrong one.",
    )
    sync_every: int = Field(
        default=10, ge=1, description="The scorer is a copy of the student, renewed every so many updates."
    )
    thr: float = Field(default=0.5, description="A reward of at least it is a success (for all-wrong groups).")
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.28, ge=0, description="How far above 1 the ratio may count.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages.")

    @model_validator(mode="after")
    def _refuse_what_has_no_meaning(self) -> Self:
        if self.evidence == "opd" and self.form == "additive":
            raise ValueError(
                "evidence opd has the expectation -KL on every token, so the additive form would punish uncertain "
                "tokens whatever the outcome; use form: multiplicative, or evidence: contrast"
            )
        if self.evidence == "opd" and self.contrast_context != "answer":
            raise ValueError("evidence opd contrasts nothing, so contrast_context must be answer")
        if self.all_wrong_kappa > 0 and self.form == "additive":
            raise ValueError(
                "all_wrong_kappa belongs to form: multiplicative; the additive form treats all-wrong groups already"
            )
        if self.all_wrong_kappa > 0 and self.evidence == "opd":
            raise ValueError("all_wrong_kappa needs evidence: contrast")
        return self

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=self.credit(),
            loss=PolicyLoss(self.clip_low, self.clip_high, self.dual_clip),
            reduction=token_mean(),
        )

    def credit(self) -> Step:
        """The advantage in the form that the settings name."""
        advantage = RewardAdvantage(self.thr, self.impute_group_advantage)
        evidence = Evidence(self.evidence, self.baseline)
        if self.form == "additive":
            only = advantage if self.negative_only else None
            contrast = from_context_contrast(kappa=self.kappa, eps=self.eps, evidence=evidence, negative_only=only)
            return chain(from_reward_advantage(advantage), contrast, keep_agreeing_with_reward(advantage))
        form = Multiplicative(self.lam_at, self.eps, self.all_wrong_kappa, self.negative_only)
        return chain(from_modulated_advantage(advantage, evidence, form))

    def lam_at(self, step: int) -> float:
        """The value of lam before update `step`."""
        return self.lam * max(0.0, 1 - step / self.lam_steps)

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        names = ("right", "wrong") if self.evidence == "contrast" else ("right",)
        options = {"contrast_context": self.contrast_context, "negative": self.negative, "unjudged": self.unjudged}
        options |= {"thr": self.thr, "sync": "snapshot", "every": self.sync_every}
        return {name: ViewSpec("self", name, options) for name in names}
