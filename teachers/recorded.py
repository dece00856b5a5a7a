"""A teacher that answers from a file."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from teachers.errors import TeacherCannot, TeacherError
from teachers.protocol import SAMPLED, Row, Want
from teachers.records import questions, read_record, to_scores
from teachers.scores import TeacherScores
from teachers.store import FILE, ScoreStore


class RecordedTeacher:
    """Gives back scores that were recorded, and refuses every other sequence.

    The file is JSON Lines in the form of `teachers.records`, written by hand, by `CachedTeacher.export`, or by another
    program. The folder of a `CachedTeacher` is read where it lies.
    """

    max_logprobs: int | None = None
    is_recording = True
    needs_extra_tokens = 0

    def __init__(self, path: str | Path, *, name: str = "recorded", teacher: str | None = None):
        """Reads the recording.

        Args:
          path: a file of JSON Lines, or a cache's folder.
          name: by which messages and metrics know this teacher.
          teacher: whose scores are meant, where the recording has those of several.

        Raises:
          TeacherError: there is no such file, a line is no record, or it is open whose scores are meant.
        """
        self.name = name
        self.path = Path(path)
        self._store = self._opened()
        known = self._store.teachers()
        if not known:
            raise TeacherError(f"{self.path} holds no scores; record some, or name another file")
        if teacher is None and len(known) > 1:
            raise TeacherError(f"{self.path} holds scores of {known}; say whose are meant: teacher=...")
        if teacher is not None and teacher not in known:
            raise TeacherError(f"{self.path} holds no scores of {teacher!r}; it has those of {known}")
        self.teacher = known[0] if teacher is None else teacher

    @property
    def fingerprint(self) -> str:
        """Whose scores these are."""
        return self.teacher

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Looks `rows` up.

        Raises:
          TeacherCannot: a row was not recorded with this `want`; the message says what was.
        """
        asked = questions(self.teacher, rows, want)
        lines = self._store.find([question.key for question in asked])
        for i, question in enumerate(asked):
            if question.key in lines:
                continue
            wants = self._store.wants(question.sequence_key)
            known = f"only with {', '.join(wants)}" if wants else "not at all"
            raise TeacherCannot(
                f"row {i} (prompt of {len(question.prompt_ids)} ids that ends in {question.prompt_ids[-5:]}, "
                f"completion of {len(question.completion_ids)} ids that begins with {question.completion_ids[:5]}) was "
                f"asked for with {question.want}; {self.path} has it {known}. A recording answers for the rollouts "
                "that it was made from: replay those, or record these with a CachedTeacher"
            )
        records = [orjson.loads(lines[question.key]) for question in asked]
        return to_scores(records, rows, want, {}, {"rows": float(len(rows))})

    def close(self) -> None:
        """Lets go of the recording."""
        self._store.close()

    def _opened(self) -> ScoreStore:
        if self.path.is_dir():
            if not (self.path / FILE).exists():
                raise TeacherError(f"the folder {self.path} is no score cache: it has no {FILE}")
            return ScoreStore(self.path / FILE)
        if not self.path.exists():
            raise TeacherError(f"there is no recording {self.path}; make one with CachedTeacher.export")
        store = ScoreStore()
        entries = []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    question, _ = read_record(line, self.name)
                except TeacherError as error:
                    raise TeacherError(f"{self.path}, line {number}: {error}") from error
                entries.append((question, line.rstrip(b"\n")))
        store.add(entries)
        return store
