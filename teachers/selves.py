"""The student as its own teacher: as it is, as it was some steps ago, as a running average, or without its adapter.

Such a teacher has something to teach only because it sees more than the student (`teachers.contexts`) or has other
weights. All four score through `teachers.scoring`, on the student's own module.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from teachers.errors import TeacherError
from teachers.pixels import ImageInputs
from teachers.protocol import SAMPLED, Row, Want
from teachers.scores import TeacherScores
from teachers.scoring import Scorer, ScoreSettings
from teachers.shadow import ShadowWeights


@dataclass(eq=False, repr=False)
class LiveTeacher:
    """The student with its present weights; nothing is copied or frozen.

    Under the student's own prompt its gap is zero by construction: see `refuse_identical`.

    Attributes:
      model: the student, without the wrappers of DDP or DeepSpeed.
      tokenizer: kept for the preflight.
      name: by which messages and metrics know this teacher.
      settings: how to score.
      processor: makes tensors of the rows' images.
      forward_module: the student as wrapped, where its forward must go through the wrapper (DeepSpeed ZeRO-3).
    """

    is_live: ClassVar[bool] = True
    """Whether the weights are the student's present ones."""

    fingerprint: ClassVar[str | None] = None
    """None: the weights change, so no score may be kept for later."""

    needs_extra_tokens: ClassVar[int] = 0
    max_logprobs: ClassVar[int | None] = None

    model: nn.Module
    tokenizer: Any = None
    name: str = field(default="self", kw_only=True)
    settings: ScoreSettings = field(default_factory=ScoreSettings, kw_only=True)
    processor: Any = field(default=None, kw_only=True)
    forward_module: nn.Module | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Reads what the model is made of."""
        images = None if self.processor is None else ImageInputs.of(self.processor, self.model)
        self._scorer = Scorer(
            self.model, self.settings, name=self.name, images=images, forward_module=self.forward_module
        )

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and completion together, in tokens."""
        return self._scorer.max_length

    @property
    def is_collective(self) -> bool:
        """Whether every rank must ask together, if need be for no rows: ZeRO-3 spreads the weights."""
        return self._scorer.decoder.is_sharded

    @property
    def logit_width(self) -> int | None:
        """Ids that the model can be fed with, padding of the vocabulary included."""
        return self._scorer.decoder.num_ids

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores `rows`; see `teachers.protocol.Teacher` and `teachers.scoring.Scorer.score`.

        Where a distribution is wanted, its head is a copy: it stays as it is now, whatever the student learns.
        """
        with self._weights():
            return self._scorer.score(rows, want)

    def after_update(self, step: int) -> None:
        """Tells the teacher that the student has taken optimizer step `step`, counted from 1."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; under ZeRO-3 of this rank alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        _refuse_other(state, set(), self.name)

    def close(self) -> None:
        """Nothing is held beside the student."""

    @contextmanager
    def _weights(self) -> Iterator[None]:
        yield


@dataclass(eq=False, repr=False)
class _ShadowTeacher(LiveTeacher):
    """A student whose trained weights are exchanged for a second set while it scores."""

    is_live = False

    def __post_init__(self) -> None:
        """Copies the trained weights."""
        super().__post_init__()
        self._shadow = ShadowWeights(self.model)
        self._step = 0

    def state_dict(self) -> dict[str, Any]:
        """The weights and the step that they belong to; under ZeRO-3 this rank's shards, so each rank saves its own."""
        return {"step": self._step, "shard": self._shadow.shard, "weights": self._shadow.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave.

        Raises:
          TeacherError: it belongs to another teacher or another model.
        """
        _refuse_other(state, {"step", "shard", "weights"}, self.name)
        if tuple(state["shard"]) != self._shadow.shard:
            raise TeacherError(
                f"teacher {self.name!r} was saved as shard {tuple(state['shard'])} (rank, ranks) and is loaded as "
                f"{self._shadow.shard}; each rank loads its own, on as many ranks as before"
            )
        self._shadow.load_state_dict(state["weights"])
        self._step = int(state["step"])

    @contextmanager
    def _weights(self) -> Iterator[None]:
        with self._shadow.in_place():
            yield


@dataclass(eq=False, repr=False, kw_only=True)
class SnapshotTeacher(_ShadowTeacher):
    """The student as it was after the last step that is a multiple of `every`; at first as it is when this is made.

    Attributes:
      every: optimizer steps between two copies, at least 1. The others are those of `LiveTeacher`.

    Raises:
      TeacherError: `every` is below 1, or the weights cannot be copied (see `ShadowWeights`).
    """

    name: str = "snapshot"
    every: int

    def __post_init__(self) -> None:
        """Copies the trained weights."""
        if self.every < 1:
            raise TeacherError(f"every must be at least 1 step; got {self.every}")
        super().__post_init__()

    def after_update(self, step: int) -> None:
        """Copies the student where `step` has reached the next multiple of `every`; a repeated step does nothing."""
        if step // self.every > self._step // self.every:
            self._shadow.copy()
        self._step = max(step, self._step)


@dataclass(eq=False, repr=False, kw_only=True)
class EmaTeacher(_ShadowTeacher):
    """A running average of the student: after each step teacher = decay * teacher + (1 - decay) * student.

    It starts from the student's present weights.

    Attributes:
      decay: share of the teacher that is kept at each step, in [0, 1). The others are those of `LiveTeacher`.

    Raises:
      TeacherError: `decay` is out of range, or the weights cannot be copied (see `ShadowWeights`).
    """

    name: str = "ema"
    decay: float

    def __post_init__(self) -> None:
        """Copies the trained weights."""
        if not 0 <= self.decay < 1:
            raise TeacherError(
                f"decay must be in [0, 1); got {self.decay}. With 0.95 the teacher goes 5% of the way at each step"
            )
        super().__post_init__()

    def after_update(self, step: int) -> None:
        """Moves towards the student; a repeated step does nothing."""
        if step > self._step:
            self._shadow.average(self.decay)
            self._step = step


@dataclass(eq=False, repr=False, kw_only=True)
class AdapterOffTeacher(LiveTeacher):
    """The base model under a PEFT adapter: the student before its training, at no cost in memory.

    Raises:
      TeacherError: the model has no adapter that could be switched off.
    """

    is_live = False

    name: str = "base"

    def __post_init__(self) -> None:
        """Looks for the adapter."""
        if not hasattr(self.model, "disable_adapter"):
            raise TeacherError(
                f"{type(self.model).__name__} has no adapter to switch off; train with LoRA, or use a local teacher "
                "with the student's first weights"
            )
        super().__post_init__()

    @contextmanager
    def _weights(self) -> Iterator[None]:
        model: Any = self.model
        with model.disable_adapter():
            yield


def refuse_identical(teacher_rows: Sequence[Row], student_rows: Sequence[Row], *, live: bool) -> None:
    """Refuses a live teacher that sees what the student sees: its gap, loss and gradient are zero at every token.

    Args:
      teacher_rows: as the teacher shall see them.
      student_rows: as the student saw them, in the same order.
      live: the teacher has the student's present weights (`LiveTeacher.is_live`).

    Raises:
      TeacherError: names the first row that is the same for both.
      ValueError: the two differ in number.
    """
    if not live:
        return
    for i, (theirs, own) in enumerate(zip(teacher_rows, student_rows, strict=True)):
        if theirs.prompt_ids == own.prompt_ids and theirs.images == own.images:
            raise TeacherError(
                f"row {i}: the teacher is the live student and sees the student's own prompt "
                f"({len(own.prompt_ids)} tokens), so its gap is zero at every token and nothing is learned. Give it a "
                "context (a reference answer, a sibling, a hint), use a snapshot or an EMA, or leave the row out"
            )


def _refuse_other(state: Mapping[str, Any], expected: set[str], name: str) -> None:
    if set(state) != expected:
        raise TeacherError(
            f"the checkpoint holds {sorted(state)} for teacher {name!r}, which needs {sorted(expected)}; "
            "resume with the kind of teacher that the run began with"
        )
