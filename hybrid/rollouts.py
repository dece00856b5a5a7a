"""The responses of a generation batch, each with its prompt, its reward and the columns of the data set.

Shape letters: N rows of all processes, F reward functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hybrid.errors import DataError, MissingMeasurement
from hybrid.pictures import PICTURE_COLUMNS, pictures_of
from hybrid.types import Demonstration


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response and what came with it.

    Attributes:
      prompt: the data set's prompt, a string or chat messages.
      prompt_ids: as the student saw it.
      completion_ids: as the student sampled it, without padding.
      text: the decoded completion.
      group: number of its prompt, the same on every process.
      position: place within its group.
      reward: weighted sum; NaN for unscored.
      columns: every other column of the data set.
      images: the prompt's images.
    """

    prompt: Any
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    group: int
    position: int
    reward: float
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Judged:
    """What the reward functions of a generation batch were given and gave.

    Attributes:
      examples: rows of the data set, of this process.
      prompts: of these rows, as TRL has prepared them.
      completion_ids: of these rows, without padding.
      rewards_NF: of the rows of all processes, by each reward function; NaN for unscored.
    """

    examples: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    rewards_NF: Float[Tensor, "N F"]


def rollouts_of(
    out: Mapping[str, Any],
    judged: Judged,
    weight_F: Float[Tensor, " F"],
    rank: int,
    group_size: int,
    tokenizer: Any,
) -> list[Rollout]:
    """The rows of one process, with group numbers that hold on every process.

    Args:
      out: TRL's batch, with the prompts' ids and mask.
      judged: the rows, and their rewards.
      weight_F: of the reward functions.
      rank: number of this process; each has as many rows.
      group_size: responses per prompt.
      tokenizer: the student's.
    """
    reward_N, first = weighted_reward(judged.rewards_NF, weight_F), rank * len(judged.examples)
    rollouts = []
    for row, example in enumerate(judged.examples):
        ids = judged.completion_ids[row]
        rollouts.append(
            Rollout(
                prompt=judged.prompts[row],
                prompt_ids=tuple(out["prompt_ids"][row][out["prompt_mask"][row].bool()].tolist()),
                completion_ids=tuple(int(token) for token in ids),
                text=tokenizer.decode(ids, skip_special_tokens=True),
                group=(first + row) // group_size,
                position=(first + row) % group_size,
                reward=float(reward_N[first + row]),
                columns={k: v for k, v in example.items() if k not in ("prompt", *PICTURE_COLUMNS)},
                images=tuple(pictures_of(example)),
            )
        )
    return rollouts


def no_reward(prompts: Sequence[Any], **columns: Any) -> list[float | None]:
    """Stands where a method needs no reward; its zeros are never read."""
    return [0.0] * len(prompts)


def weighted_reward(rewards_NF: Float[Tensor, "N F"], weight_F: Float[Tensor, " F"]) -> Float[Tensor, " N"]:
    """The weighted sum of the rewards that scored a response; NaN where none did."""
    sum_N = (rewards_NF * weight_F.to(rewards_NF.device)).nansum(1)
    return sum_N.masked_fill(rewards_NF.isnan().all(1), torch.nan)


def demonstrations(own: Sequence[Rollout], encode: Callable[[str], Sequence[int]]) -> Demonstration:
    """The data set's `demonstration` column (text, ids, or null) as padded ids.

    Raises:
      MissingMeasurement: the data set has no such column.
    """
    rows: list[Sequence[int]] = []
    for rollout in own:
        if "demonstration" not in rollout.columns:
            raise MissingMeasurement(
                "the method needs demonstration, a column with a correct teacher text per prompt (null where there is "
                "none); make it with `hybrid teacher demonstrate`, or set the method to train without it"
            )
        value = rollout.columns["demonstration"]
        rows.append([] if value is None else encode(value) if isinstance(value, str) else list(value))
    width = max(1, *(len(row) for row in rows)) if rows else 1
    ids_BU = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BU = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids_BU[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask_BU[index, : len(row)] = True
    return Demonstration(ids_BU=ids_BU, mask_BU=mask_BU)


def teacher_accuracies(own: Sequence[Rollout]) -> Float[Tensor, " B"]:
    """The data set's `teacher_accuracy` column.

    Raises:
      MissingMeasurement: the data set has no such column, or a value outside [0, 1].
    """
    values = []
    for rollout in own:
        value = rollout.columns.get("teacher_accuracy")
        if value is None:
            raise MissingMeasurement(
                "the method needs teacher_accuracy, a column with the share of the teacher's own right answers per "
                "prompt; make it with `hybrid teacher demonstrate`"
            )
        if not 0 <= float(value) <= 1:
            raise DataError(f"teacher_accuracy must be in [0, 1]; got {value} for prompt {rollout.prompt!r}")
        values.append(float(value))
    return torch.tensor(values)


def on_device(demonstration: Demonstration, device: torch.device) -> Demonstration:
    """The demonstrations on the device of the batch."""
    return Demonstration(ids_BU=demonstration.ids_BU.to(device), mask_BU=demonstration.mask_BU.to(device))
