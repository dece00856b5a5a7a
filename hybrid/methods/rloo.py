"""RLOO: REINFORCE with the mean of the other responses as the baseline.

Differs from the paper: the surrogate is PPO's, clipped, so that a batch may serve several updates (TRL's RLOOTrainer
does the same, with one ratio per response); with one update per batch the gradient is the paper's. No KL in the
reward.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.estimators import from_leave_one_out
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean, token_sum
from hybrid.objective.step import chain


class Rloo(ClippedMethod):
    """A reward against the mean of the other responses to the same prompt."""

    formula: ClassVar[str] = "A[i,t] = R[i] - mean_{j != i} R[j];  loss = - mean_i sum_t A[i] log p(y[i,t])"
    paper: ClassVar[str] = "Back to basics: revisiting REINFORCE style optimization (arXiv 2402.14740)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "reduction": "arXiv 2402.14740, the log-probability of the whole response",
        "clip_low": "TRL 1.16, RLOOConfig.epsilon",
        "clip_high": "TRL 1.16, RLOOConfig.epsilon",
    }

    name: Literal["rloo"] = "rloo"
    reduction: Literal["token_sum", "token_mean"] = Field(
        default="token_sum", description="Sum over a response's tokens as the paper writes it, or mean over all tokens."
    )

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_leave_one_out()),
            loss=self.policy_loss(),
            reduction=token_sum() if self.reduction == "token_sum" else token_mean(),
        )
