"""Supervised fine-tuning on teacher texts, as a method: the off-policy baseline, and a part for mixtures.

Differs from the usual SFT loss: a mean over the tokens of a text first, then over the prompts that own one, so that a
long text weighs no more than a short one and rows repeated by group sampling count once.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.losses import Likelihood
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.signals import from_teacher_known
from hybrid.objective.step import chain


class Sft(MethodConfig):
    """Imitates a stored teacher text per prompt; the student's own responses train nothing."""

    formula: ClassVar[str] = "loss = mean over prompts of - mean_u log p(demonstration[u])"
    paper: ClassVar[str] = "sequence-level knowledge distillation (arXiv 1606.07947)"
    sources: ClassVar[Mapping[str, str]] = {}

    name: Literal["sft"] = "sft"

    @override
    def build(self) -> Objective:
        return objective(name=self.name, credit=chain(from_teacher_known()), loss=Likelihood(), reduction=token_mean())
