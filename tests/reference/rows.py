"""A batch as plain Python: one record per response, lists over its own tokens, None where nothing is known."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.types import RolloutBatch

Numbers = list[float]
Scores = list[float | None]


@dataclass(frozen=True)
class Row:
    group: int
    places: list[int]
    reward: float | None
    truncated: bool
    accuracy: float
    student: Numbers
    entropy: Numbers
    kl: Numbers
    scores: dict[str, Scores]
    text: Numbers

    @property
    def length(self) -> int:
        return len(self.places)

    def gap(self, name: str = "teacher") -> Scores:
        return [None if s is None else s - old for s, old in zip(self.scores[name], self.student, strict=True)]


def rows_of(batch: RolloutBatch, text_logprob_BU: Tensor | None = None) -> list[Row]:
    rows = []
    for i in range(len(batch.group_B)):
        places = batch.mask_BT[i].nonzero()[:, 0].tolist()

        def own(value_BT: Tensor | None, i: int = i, places: list[int] = places) -> Numbers:
            return [] if value_BT is None else [float(value_BT[i, t]) for t in places]

        scores: dict[str, Scores] = {
            name: [
                score if bool(view.valid_BT[i, t]) else None
                for score, t in zip(own(view.logprob_BT), places, strict=True)
            ]
            for name, view in batch.views.items()
        }
        reward = None if batch.reward_B is None or batch.reward_B[i].isnan() else float(batch.reward_B[i])
        mask_U = None if batch.demonstration is None else batch.demonstration.mask_BU[i]
        text = [] if mask_U is None or text_logprob_BU is None else text_logprob_BU[i][mask_U].tolist()
        rows.append(
            Row(
                group=int(batch.group_B[i]),
                places=places,
                reward=reward,
                truncated=batch.truncated_B is not None and bool(batch.truncated_B[i]),
                accuracy=0.0 if batch.teacher_accuracy_B is None else float(batch.teacher_accuracy_B[i]),
                student=own(batch.student_logprob_BT),
                entropy=own(batch.entropy_BT),
                kl=own(batch.reverse_kl_BT),
                scores=scores,
                text=text,
            )
        )
    return rows


def tensor_of(rows: Sequence[Row], values: Sequence[Sequence[float]], width: int) -> Tensor:
    """Values over own tokens, put back at their places; 0 elsewhere."""
    out_BT = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        for t, v in zip(row.places, value, strict=True):
            out_BT[i, t] = v
    return out_BT


def siblings(rows: Sequence[Row], row: Row) -> list[Row]:
    return [other for other in rows if other.group == row.group]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def scored(rows: Iterable[Row]) -> list[float]:
    return [row.reward for row in rows if row.reward is not None]


def constant(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Numbers]:
    return [[value(row)] * row.length for row in rows]
