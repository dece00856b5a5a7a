"""A teacher that is asked once for each sequence, and remembers."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from teachers.errors import TeacherCannot, TeacherError
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.records import Question, questions, to_lines, to_scores
from teachers.scores import TeacherScores
from teachers.store import FILE, ScoreStore


class CachedTeacher:
    """Wraps a teacher whose weights do not change; scores once, trains many times.

    Answers are kept by content: identity of the teacher, ids of prompt and completion, pixels, and what was asked. The
    folder may be shared by all processes of this machine and by later runs. A failed row is not kept. Scores come back
    on the CPU, the same from the cache as from the teacher.
    """

    def __init__(self, inner: Teacher, folder: str | Path, *, identity: str | None = None):
        """Opens the cache.

        Args:
          inner: asked for what is not there yet.
          folder: made where it does not exist; on a disk of this machine.
          identity: tells this teacher's scores from all others in the folder; None takes the teacher's fingerprint, or
            what its servers say about themselves.

        Raises:
          TeacherCannot: the teacher's weights change, or it does not say who it is.
          TeacherError: the folder holds something else.
        """
        self.inner = inner
        self.is_remote = getattr(inner, "is_remote", False)
        self.identity = identity if identity is not None else identity_of(inner)
        self.path = Path(folder) / FILE
        self._store = ScoreStore(self.path)

    @property
    def name(self) -> str:
        """The wrapped teacher's."""
        return self.inner.name

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores `rows`; `stats` counts `cache_hits` and `cache_misses`, a sequence that stands twice once.

        Raises:
          TeacherCannot: the full distribution is wanted, which is not kept.
          TeacherError: whatever the wrapped teacher raises.
        """
        asked = questions(self.identity, rows, want)
        keys = [question.key for question in asked]
        lines = self._store.find(keys)
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            if key not in lines:
                first.setdefault(key, i)
        failures: dict[str, str] = {}
        stats: dict[str, float] = {"cache_hits": float(len(lines)), "cache_misses": float(len(first))}
        if first:
            fresh, failures, cost = self._ask([(asked[i], rows[i], i) for i in first.values()], want)
            lines |= fresh
            stats |= cost
        records = [orjson.loads(lines[key]) if key in lines else None for key in keys]
        failed = {i: failures[key] for i, key in enumerate(keys) if key in failures}
        return to_scores(records, rows, want, failed, stats)

    def export(self, path: str | Path) -> int:
        """Writes all records of the cache as JSON Lines, which `RecordedTeacher` reads; whole or not at all.

        Returns:
          How many there are.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        num_lines = 0
        with draft.open("wb") as file:
            for num_lines, line in enumerate(self._store.lines(), start=1):  # noqa: B007 - the count is the result
                file.write(line + b"\n")
        draft.replace(target)
        return num_lines

    def close(self) -> None:
        """Closes the wrapped teacher; the cache stays."""
        self.inner.close()

    def _ask(
        self, missing: Sequence[tuple[Question, Row, int]], want: Want
    ) -> tuple[dict[str, bytes], dict[str, str], dict[str, float]]:
        """Asks the teacher: lines by key, reasons of failures by key, and what asking cost."""
        if want.candidates_BTK is not None:
            want = replace(want, candidates_BTK=want.candidates_BTK[[i for _, _, i in missing]])
        scores = self.inner.score([row for _, row, _ in missing], want)
        asked = [question for question, _, _ in missing]
        pairs = list(zip(asked, to_lines(asked, scores), strict=True))
        self._store.add((question, line) for question, line in pairs if line is not None)
        lines = {question.key: line for question, line in pairs if line is not None}
        failures = {asked[i].key: reason for i, reason in scores.failures.items()}
        return lines, failures, dict(scores.stats)


def identity_of(teacher: Any) -> str:
    """Who a teacher is, so that its scores are never taken for another's.

    Args:
      teacher: with a `fingerprint`, or with servers that tell `facts` about themselves.

    Raises:
      TeacherCannot: its weights change while it is used, or nothing tells it apart.
    """
    if hasattr(teacher, "fingerprint"):
        if teacher.fingerprint is None:
            raise TeacherCannot(
                f"the scores of teacher {teacher.name!r} cannot be kept: its weights change, or no process sees all of "
                "them. Use it without a cache"
            )
        return f"{teacher.name}-{teacher.fingerprint}"
    facts: Callable[[], Sequence[Any]] | None = getattr(teacher, "facts", None)
    told = sorted({f"{fact.root}-{fact.fingerprint or fact.version}" for fact in facts()}) if facts is not None else []
    if not told:
        raise TeacherCannot(
            f"teacher {teacher.name!r} has no fingerprint, so nothing tells its scores from another's; pass "
            "identity=..., such as the name and revision of its model"
        )
    if len(told) > 1:
        raise TeacherError(f"the servers of teacher {teacher.name!r} differ: {told}; serve one model on all of them")
    return f"{teacher.name}-{told[0]}"
