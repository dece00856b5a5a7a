"""Dr. GRPO: GRPO without its two divisors, the group's deviation and the response's own length.

Differs from the paper: nothing. The constant length is a setting; without one it is the run's limit on response tokens,
and in a record, which names no limit, the longest response.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from hybrid.methods.base import ClippedMethod
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import length_constant
from hybrid.objective.signals import from_group_advantage
from hybrid.objective.step import chain


class DrGrpo(ClippedMethod):
    """A reward against its siblings' mean, undivided, summed over tokens and divided by a constant length."""

    formula: ClassVar[str] = "A[i,t] = R[i] - mean_g R;  loss = 1 / (N L) sum_i sum_t of the clipped surrogate"
    paper: ClassVar[str] = "Understanding R1-Zero-like training (arXiv 2503.20783)"
    min_generations: ClassVar[int] = 2
    sources: ClassVar[Mapping[str, str]] = {
        "max_length": "arXiv 2503.20783, the constant generation budget of the masked mean",
        "clip_low": "PPO's 0.2, as in TRL 1.16",
        "clip_high": "PPO's 0.2, as in TRL 1.16",
    }

    name: Literal["dr_grpo"] = "dr_grpo"
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="The constant L; null is the run's limit on response tokens (a record's longest).",
    )

    @override
    def build(self) -> Objective:
        return objective(
            name=self.name,
            credit=chain(from_group_advantage()),
            loss=self.policy_loss(),
            reduction=length_constant(self.max_length),
        )
