"""Records by content key in SQLite: many readers and writers at once, each write whole or not at all."""

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock

from teachers.errors import TeacherError
from teachers.records import Question

FILE = "scores.sqlite"
"""Name of the database in a cache's folder."""

BUSY_S = 60.0
"""How long a writer waits for the others."""

_AT_ONCE = 500
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS scores "
    "(key TEXT PRIMARY KEY, sequence TEXT NOT NULL, teacher TEXT NOT NULL, want TEXT NOT NULL, line BLOB NOT NULL)"
)
_INDEX = "CREATE INDEX IF NOT EXISTS by_sequence ON scores (sequence)"


class ScoreStore:
    """A table of records, in a file or in memory.

    A file is opened for each call, so that the store works in threads and forked processes. It must lie on a disk of
    this machine: SQLite's log does not work over network file systems.
    """

    def __init__(self, path: Path | None = None):
        """Opens or makes the table.

        Args:
          path: the file; its folder is made. None keeps the table in memory.

        Raises:
          TeacherError: the file is no such table.
        """
        self._path = path
        self._lock = threading.Lock()
        self._memory = sqlite3.connect(":memory:", check_same_thread=False) if path is None else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # one after another: SQLite has nobody wait who changes the journal while others are about to
        alone = nullcontext() if path is None else FileLock(path.with_name(f"{path.name}.lock"))
        with alone, self._connection() as connection:
            if path is not None:
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(_SCHEMA)
            connection.execute(_INDEX)

    def find(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Lines of those `keys` that are there."""
        found: dict[str, bytes] = {}
        unique = list(dict.fromkeys(keys))
        with self._connection() as connection:
            for start in range(0, len(unique), _AT_ONCE):
                part = unique[start : start + _AT_ONCE]
                places = ",".join("?" * len(part))
                found |= dict(connection.execute(f"SELECT key, line FROM scores WHERE key IN ({places})", part))
        return found

    def add(self, records: Iterable[tuple[Question, bytes]]) -> None:
        """Adds records; the first answer to a question stays."""
        rows = [(q.key, q.sequence_key, q.teacher, q.want, line) for q, line in records]
        with self._connection() as connection, connection:
            connection.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?, ?, ?, ?)", rows)

    def teachers(self) -> list[str]:
        """Identities of all teachers that have records."""
        with self._connection() as connection:
            return sorted(row[0] for row in connection.execute("SELECT DISTINCT teacher FROM scores"))

    def wants(self, sequence_key: str) -> list[str]:
        """What has been asked about a sequence."""
        with self._connection() as connection:
            rows = connection.execute("SELECT DISTINCT want FROM scores WHERE sequence = ?", [sequence_key])
            return sorted(row[0] for row in rows)

    def lines(self) -> Iterator[bytes]:
        """All records, in the order in which they came."""
        with self._connection() as connection:
            for (line,) in connection.execute("SELECT line FROM scores ORDER BY rowid"):
                yield line

    def __len__(self) -> int:
        """Number of records."""
        with self._connection() as connection:
            return connection.execute("SELECT COUNT(*) FROM scores").fetchone()[0]

    def close(self) -> None:
        """Lets go of a table in memory."""
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._memory is not None:
                with self._lock:
                    yield self._memory
            else:
                with closing(sqlite3.connect(str(self._path), timeout=BUSY_S)) as connection:
                    yield connection
        except sqlite3.DatabaseError as error:
            raise TeacherError(
                f"the score cache {self._path} cannot be used ({error}); it must be a database of this program, on a "
                "disk of this machine with room left"
            ) from error
