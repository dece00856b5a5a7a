"""Recovering learning signals by teacher guidance: GRPO where a group is mixed, distillation where all of it failed.

No official code was found. RECONSTRUCTED: the share of tokens that are kept, how entropy and gap are normalised, and
the normaliser of the likelihood term. Statistics over the batch run over the tokens of all-wrong groups, for only they
have a teacher's score.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig, ViewSpec
from hybrid.objective.gates import keep_telling_tokens
from hybrid.objective.groups import Scale, all_wrong, mixed
from hybrid.objective.losses import Likelihood, PolicyLoss
from hybrid.objective.objective import Objective, mix, objective
from hybrid.objective.reductions import token_mean, token_mean_with_texts
from hybrid.objective.row_gates import keep_untruncated
from hybrid.objective.schedules import linear_floor
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import Step, chain, route
from hybrid.objective.weights import weight_by_schedule, weight_by_teacher_accuracy


class Rstg(MethodConfig):
    """Lets the teacher speak only where reward is silent: on groups in which every response failed."""

    formula: ClassVar[str] = (
        "mixed group: A[i,t] = (R[i] - mean_g R) [/ (std_g R + 1e-4)];  all wrong: A[i,t] = beta_k omega_i M[i,t] "
        "(log pT - log pS), M = top k% of s = h + d - h d;  beta_k = max(beta_min, beta_init - delta k);  "
        "L = L_pg(A) + beta_k * NLL(teacher text of all-wrong prompts)"
    )
    paper: ClassVar[str] = "Recovering learning signals via adaptive teacher guidance, RSTG (arXiv 2608.00782)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "scale": "not found; the host trainer's default (TRL: group, with 1e-4 added)",
        "beta_init": "paper, annealing",
        "delta": "paper, annealing",
        "beta_min": "paper, annealing",
        "k_percent": "RECONSTRUCTED: the main retention of TIP (arXiv 2604.14084)",
        "scope": "RECONSTRUCTED from TIP",
        "entropy_percentile": "RECONSTRUCTED from TIP",
        "sft": "RECONSTRUCTED: Eq. 14 leaves the normaliser open",
        "fail_thr": "ours, for rewards that are not binary",
        "exclude_truncated": "ours",
        "finished_only": "ours",
        "clip_low": "assumed; as OPDVR's script",
        "clip_high": "assumed; as OPDVR's script",
        "dual_clip": "assumed; as OPDVR's script",
    }

    name: Literal["rstg"] = "rstg"
    scale: Scale = Field(default="group", description="Standard deviation that mixed groups are divided by.")
    beta_init: float = Field(default=5e-3, ge=0, description="Weight of the guidance before the first update.")
    delta: float = Field(default=5e-5, ge=0, description="How much it falls with each update.")
    beta_min: float = Field(default=1e-3, ge=0, description="Below which it does not fall.")
    k_percent: float = Field(
        default=50.0, gt=0, le=100, description="Share of tokens that are guided, k% (RECONSTRUCTED)."
    )
    scope: Literal["batch", "response"] = Field(
        default="batch", description="Among which tokens k% are picked (RECONSTRUCTED)."
    )
    entropy_percentile: float | None = Field(
        default=98.0,
        gt=0,
        le=100,
        description="Higher entropies count as this percentile; null for none (RECONSTRUCTED).",
    )
    sft: Literal["prompt_mean", "pooled", "in_policy", "off"] = Field(
        default="prompt_mean",
        description="Likelihood of a teacher text per all-wrong prompt: mean of token means, one token mean with the "
        "responses, the same as a policy gradient with advantage 1, or none (RECONSTRUCTED).",
    )
    fail_thr: float = Field(
        default=0.0, description="A group whose best reward is not above it, and all equal, failed."
    )
    exclude_truncated: bool = Field(default=False, description="Truncated responses of failed groups are not guided.")
    finished_only: bool = Field(default=False, description="Groups are judged by responses that are not truncated.")
    clip_low: float = Field(default=0.2, ge=0, description="How far below 1 the ratio may count.")
    clip_high: float = Field(default=0.2, ge=0, description="How far above 1 the ratio may count.")
    dual_clip: float | None = Field(default=3.0, gt=1, description="Bound on the ratio for negative advantages.")

    @override
    def build(self) -> Objective:
        credit = self.credit()
        pooled = self.sft in ("pooled", "in_policy")
        policy = objective(
            name=self.name,
            credit=credit,
            loss=PolicyLoss(self.clip_low, self.clip_high, self.dual_clip),
            reduction=token_mean_with_texts("all_wrong", credit.branches) if pooled else token_mean(),
        )
        if self.sft == "off":
            return policy
        loss = Likelihood("all_wrong", "pooled" if pooled else "prompt_mean", as_policy=self.sft == "in_policy")
        imitation = objective(name=self.name, credit=credit, loss=loss, reduction=token_mean())
        return mix((1.0, policy), (self.beta, imitation))

    def credit(self) -> Step:
        """Guidance for groups that failed, GRPO for mixed ones, nothing for the rest."""
        guidance = chain(
            from_teacher_gap(),
            *((keep_untruncated(),) if self.exclude_truncated else ()),
            keep_telling_tokens(percent=self.k_percent, scope=self.scope, entropy_percentile=self.entropy_percentile),
            weight_by_teacher_accuracy(),
            weight_by_schedule(self.beta),
        )
        return route(
            (all_wrong(self.fail_thr, finished_only=self.finished_only), guidance),
            (mixed(finished_only=self.finished_only), from_group_advantage(scale=self.scale)),
        )

    @property
    def beta(self) -> partial[float]:
        """The weight of guidance and likelihood before update k."""
        return partial(linear_floor, self.beta_init, self.delta, self.beta_min)

    @property
    @override
    def views(self) -> Mapping[str, ViewSpec]:
        # a response judged unfinished may leave a group all wrong that has a right one, so then every row is scored
        options = {} if self.finished_only else {"rows": "all_wrong", "fail_thr": self.fail_thr}
        return {"teacher": ViewSpec(options=options)}
