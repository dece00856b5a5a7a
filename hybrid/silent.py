"""A tracker for the processes that leave the tracking to rank 0."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat


class Silent:
    """Takes what `hybrid.tracking.Tracker` takes, and keeps nothing.

    Attributes:
      run_id: empty.
      uri: empty.
    """

    run_id = ""
    uri = ""

    def params(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def metrics(self, values: Mapping[str, SupportsFloat | None], step: int) -> None:
        """Nothing."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Nothing."""

    def history(self, run_id: str, last_step: int) -> None:
        """Nothing."""

    def artifact_text(self, name: str, text: str) -> None:
        """Nothing."""

    def artifact_json(self, name: str, value: Any) -> None:
        """Nothing."""

    def artifact_file(self, path: Path, folder: str = "") -> None:
        """Nothing."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def environment(self) -> None:
        """Nothing."""

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Nothing waits."""
        return True

    def close(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""
