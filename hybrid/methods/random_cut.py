"""On-policy distillation on a random first part of each response: the length-matched control for KAT.

KAT keeps fewer tokens, and a random cut that keeps as few must do worse before its threshold can be given the credit.
Set `keep_share` to the share that KAT kept (its metric `kept/kl_trap`); the paper's runs give 456/1013.

Differs from the paper: its random control was longer than KAT; this one takes the length as a setting. The cut is
drawn from seed, step and the response itself, so that order, process count and a recorded run give the same cut.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.losses import Divergence
from hybrid.objective.objective import Objective, objective
from hybrid.objective.random_cut import keep_random_prefix
from hybrid.objective.reductions import kept_token_mean
from hybrid.objective.signals import from_teacher_known
from hybrid.objective.step import chain


class RandomCut(MethodConfig):
    """Reverse KL on a random prefix of each response."""

    formula: ClassVar[str] = (
        "c[i,t] = 1 where t < ceil(u[i] * |o[i]|), u[i] uniform with mean keep_share;  loss = c * KL(pS || pT)"
    )
    paper: ClassVar[str] = "the random control of KAT (arXiv 2606.09471), length-matched by us"
    sources: ClassVar[Mapping[str, str]] = {
        "keep_share": "arXiv 2606.09471, the 1.7B student: KAT kept 456 of 1013 tokens",
        "seed": "ours",
        "min_keep": "ours, as for KAT",
        "top_k": "arXiv 2606.09471: top 64 and a tail",
        "support": "RECONSTRUCTED: whose top 64 is not stated",
    }

    name: Literal["random_cut"] = "random_cut"
    keep_share: float = Field(default=0.45, gt=0, le=1, description="Mean share of a response's tokens to keep.")
    seed: int = Field(default=0, description="Of the cuts.")
    min_keep: int = Field(default=1, ge=0, description="Tokens that are kept whatever is drawn.")
    top_k: int = Field(
        default=64, ge=0, description="Size of the support, with a tail bucket; 0 is the full vocabulary."
    )
    support: Literal["student", "teacher", "union"] = Field(
        default="student", description="Whose top-k (RECONSTRUCTED)."
    )

    @override
    def build(self) -> Objective:
        cut = keep_random_prefix(seed=self.seed, keep_share=self.keep_share, min_keep=self.min_keep)
        support = self.support if self.top_k else "full"
        return objective(
            name=self.name,
            credit=chain(from_teacher_known(), cut),
            loss=Divergence("reverse_kl", support, self.top_k or 64),
            reduction=kept_token_mean(),
        )
