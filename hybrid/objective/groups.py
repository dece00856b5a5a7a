"""Statistics over the responses to one prompt. Unscored responses (NaN reward) are left out, never counted as 0."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybrid.objective.step import RowTest
from hybrid.types import RolloutBatch

Scale = Literal["none", "group", "batch"]
"""What a group-relative advantage is divided by."""


def group_index(group_B: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """Numbers the groups from 0 on; returns each row's number and how many there are."""
    _, index_B = torch.unique(group_B, return_inverse=True)
    return index_B, int(index_B.max()) + 1 if len(index_B) else 0


def group_sum(value_B: Float[Tensor, " B"], index_B: Int[Tensor, " B"], num_groups: int) -> Float[Tensor, " G"]:
    """Sum over each group."""
    return torch.zeros(num_groups, dtype=value_B.dtype, device=value_B.device).index_add(0, index_B, value_B)


def group_mean(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each row's group mean over scored rows; NaN for a group without any."""
    index_B, num_groups = group_index(group_B)
    scored_B = ~reward_B.isnan()
    count_G = group_sum(scored_B.to(reward_B.dtype), index_B, num_groups)
    return (group_sum(reward_B.nan_to_num(nan=0.0), index_B, num_groups) / count_G)[index_B]


def group_std(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each row's unbiased (n - 1) group standard deviation over scored rows; 0 where fewer than two are scored."""
    index_B, num_groups = group_index(group_B)
    scored_B = ~reward_B.isnan()
    count_G = group_sum(scored_B.to(reward_B.dtype), index_B, num_groups)
    deviation_B = (reward_B - group_mean(reward_B, group_B)).nan_to_num(nan=0.0)
    return (group_sum(deviation_B**2, index_B, num_groups) / (count_G - 1).clamp(min=1)).sqrt()[index_B]


def group_advantage(
    reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"], *, scale: Scale = "none", eps: float = 1e-4
) -> Float[Tensor, " B"]:
    """How much better a response is than its siblings.

        A[i] = (R[i] - mean_g R) / (std + eps),     std over the group, over the batch, or no division

    Args:
      reward_B: rewards; NaN is an unscored response.
      group_B: prompt of each response.
      scale: "none" (Dr. GRPO, SIPO), "group" (GRPO) or "batch".
      eps: added to the standard deviation, which is the unbiased one.

    Returns:
      The advantage; exactly 0 for unscored rows, for a group of one and for a group of equal rewards.

    Reference:
      DeepSeekMath, section 4.1.1 (arXiv 2402.03300); eps and the unbiased deviation as in TRL.
    """
    # Rounding must not give a group of equal rewards an advantage of 1e-17: its sign would count (SIPO's guard).
    uniform_B = group_uniform(reward_B, group_B)
    centred_B = (reward_B - group_mean(reward_B, group_B)).masked_fill(uniform_B | reward_B.isnan(), 0)
    if scale == "none":
        return centred_B
    if scale == "group":
        deviation_B = group_std(reward_B, group_B)
    else:
        scored_B = reward_B[~reward_B.isnan()]
        deviation_B = (scored_B.std() if len(scored_B) > 1 else reward_B.new_zeros(())).expand_as(reward_B)
    # With eps = 0 a uniform group is 0 / 0, and has no advantage all the same.
    return centred_B / (deviation_B + eps).masked_fill(centred_B == 0, 1)


def group_range(
    reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Largest and smallest scored reward of each row's group; -inf and +inf for a group without any."""
    index_B, num_groups = group_index(group_B)
    unscored_B = reward_B.isnan()
    empty_G = reward_B.new_full((num_groups,), -torch.inf)
    best_G = empty_G.scatter_reduce(0, index_B, reward_B.masked_fill(unscored_B, -torch.inf), "amax")
    worst_G = (-empty_G).scatter_reduce(0, index_B, reward_B.masked_fill(unscored_B, torch.inf), "amin")
    return best_G[index_B], worst_G[index_B]


def group_uniform(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """True in groups whose scored rewards are all the same number; a group without any is one."""
    best_B, worst_B = group_range(reward_B, group_B)
    return best_B <= worst_B


def judged_reward(batch: RolloutBatch, finished_only: bool) -> Float[Tensor, " B"]:
    """The rewards that a test on groups looks at: with `finished_only`, truncated responses count as unscored."""
    reward_B = batch.need("reward")
    return reward_B.masked_fill(batch.need("truncated"), torch.nan) if finished_only else reward_B


def judged_needs(finished_only: bool) -> frozenset[str]:
    """What `judged_reward` reads."""
    return frozenset({"reward", "truncated"}) if finished_only else frozenset({"reward"})


def all_wrong(fail_thr: float = 0.0, spread: float = 1e-6, *, finished_only: bool = False) -> RowTest:
    """Rows of groups in which every scored response failed: max R <= fail_thr and max R - min R < spread."""

    def test(batch: RolloutBatch) -> Bool[Tensor, " B"]:
        best_B, worst_B = group_range(judged_reward(batch, finished_only), batch.group_B)
        return (best_B <= fail_thr) & (best_B - worst_B < spread) & best_B.isfinite()

    return RowTest("all_wrong", test, judged_needs(finished_only))


def mixed(spread: float = 1e-6, *, finished_only: bool = False) -> RowTest:
    """Rows of groups whose scored rewards differ by at least `spread`."""

    def test(batch: RolloutBatch) -> Bool[Tensor, " B"]:
        best_B, worst_B = group_range(judged_reward(batch, finished_only), batch.group_B)
        return best_B - worst_B >= spread

    return RowTest("mixed", test, judged_needs(finished_only))


def all_right(success_thr: float = 0.0, spread: float = 1e-6) -> RowTest:
    """Rows of groups in which every scored response succeeded: min R > success_thr and max R - min R < spread."""

    def test(batch: RolloutBatch) -> Bool[Tensor, " B"]:
        best_B, worst_B = group_range(batch.need("reward"), batch.group_B)
        return (worst_B > success_thr) & (best_B - worst_B < spread) & worst_B.isfinite()

    return RowTest("all_right", test, frozenset({"reward"}))
