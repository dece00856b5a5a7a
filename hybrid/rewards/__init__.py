"""Verifiers: what a completion is worth, as reward functions that TRL takes as they are.

`RewardConfig` is what stands in the YAML, `build_rewards` makes the functions of a run.
"""

from hybrid.rewards.config import (
    ExactConfig,
    FormatConfig,
    MathConfig,
    PythonConfig,
    ReasoningGymConfig,
    RewardConfig,
    build_rewards,
)
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.gym import GYM_COLUMN, gym_record

__all__ = [
    "GYM_COLUMN",
    "ExactConfig",
    "FormatConfig",
    "MathConfig",
    "PythonConfig",
    "ReasoningGymConfig",
    "RewardConfig",
    "RewardFunction",
    "build_rewards",
    "gym_record",
]
