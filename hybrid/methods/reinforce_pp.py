"""REINFORCE++: rewards normalised over the whole batch instead of over each group.

Differs from the paper: no KL to a reference model, neither in the reward (REINFORCE++) nor as a k2 loss (with
baseline); mix it with `opd` and a reference as the teacher where one is wanted.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.estimators import from_whitened_reward
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.step import chain


class ReinforcePp(ClippedMethod):
    """Reward, less its group's mean with `baseline: group`, whitened over the batch."""

    formula: ClassVar[str] = (
        "none: x[i] = R[i];  group: x[i] = R[i] - mean_g R;  A[i,t] = (x[i] - mean_batch x) / max(std_batch x, eps)"
    )
    paper: ClassVar[str] = "REINFORCE++ (arXiv 2501.03262)"
    sources: ClassVar[Mapping[str, str]] = {
        "baseline": "arXiv 2501.03262: REINFORCE++ is none, REINFORCE++ w/ baseline is group",
        "over": "the authors' OpenRLHF: statistics over all response tokens",
        "eps": "the authors' OpenRLHF: variance clamped at 1e-8",
        "clip_low": "PPO's 0.2",
        "clip_high": "PPO's 0.2",
    }

    name: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = Field(
        default="none", description="What is taken off the reward before whitening."
    )
    over: Literal["tokens", "responses"] = Field(
        default="tokens", description="What the batch's mean and deviation count."
    )
    eps: float = Field(default=1e-4, gt=0, description="Smallest deviation that is divided by.")

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_whitened_reward(baseline=self.baseline, over=self.over, eps=self.eps)),
            loss=self.policy_loss(),
            reduction=token_mean(),
        )
