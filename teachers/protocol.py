"""The one protocol through which every teacher is asked: ids in, log-probs of the same ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from teachers.scores import TeacherScores


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence to score: the teacher's prompt, and the student's completion, which is never re-tokenised.

    Attributes:
      prompt_ids: the prompt as this teacher shall see it (its own template, a privileged context, ...).
      completion_ids: the student's sampled ids, without padding; may be empty.
      images: PIL images that the prompt's image tokens stand for, in order.
      labels: columns of the data set, by which a router chooses.
      seen_by: the row as single teachers of a router see it, by their names, where that differs; None is: that teacher
        has nothing to look at.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    images: tuple[Any, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    seen_by: tuple[tuple[str, "Row | None"], ...] = ()

    def seen(self, teacher: str) -> "Row | None":
        """This row as one of a router's teachers sees it; None where it has nothing to look at."""
        return dict(self.seen_by).get(teacher, self)


@dataclass(frozen=True, kw_only=True)
class Want:
    """What beside the sampled tokens' log-probs is asked for.

    Attributes:
      top_k: size of the teacher's own top-k support; 0 for none.
      candidates_BTK: ids chosen by the student, scored instead of the teacher's own; -1 is padding.
      distribution: the full distribution is needed (hidden states and a head, or nothing).
    """

    top_k: int = 0
    candidates_BTK: Int[Tensor, "B T K"] | None = None
    distribution: bool = False


SAMPLED = Want()


@runtime_checkable
class Teacher(Protocol):
    """Anything that scores completions.

    `score` answers for every row, in order, with tensors padded on the right to the longest completion. It raises
    `TeacherCannot` for a want that its transport cannot deliver, and follows its failure policy otherwise: a failed row
    is masked and named in `failures`, never given a zero score.
    """

    @property
    def name(self) -> str:
        """For messages and metrics."""
        ...

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores `rows`; see `TeacherScores` for shapes and units."""
        ...

    def close(self) -> None:
        """Releases what the teacher holds (connections, memory, a server that it started)."""
        ...
