"""Progress for a person who waits: a bar for every long part, and what matters of the numbers, live."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

SHOWN = (("reward", "reward"), ("eval/avg", "held-out"), ("gap/mean", "gap"), ("train/loss", "loss"))
"""Beginning of a metric's name, and how the bar calls it."""

PLAIN_EVERY = 10
"""Steps between two lines where the output is no terminal."""


class Bars(AbstractContextManager["Bars"]):
    """Bars of rich on a terminal; a line now and then elsewhere, so that a log stays readable."""

    def __init__(self, console: Console) -> None:
        """Draws on `console`."""
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def advance(self, part: str, done: int, total: int, note: str = "") -> None:
        """Shows how far a part is; a finished part's bar goes away."""
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total, note=note)
        self._progress.update(self._tasks[part], completed=done, total=total, note=note)
        if done >= total > 0:
            self._progress.remove_task(self._tasks.pop(part))
        if not self.console.is_terminal:
            self._plain(part, done, total, note)

    def advance_part(self, part: str, done: int, total: int) -> None:
        """Shows how far a part of a step is; too short-lived for a log, so on a terminal alone."""
        if self.console.is_terminal:
            self.advance(f"  {part}", done, total)

    def part(self, name: str) -> Callable[[int, int], None]:
        """A reporter of one part's progress."""
        return lambda done, total: self.advance(name, done, total)

    def _plain(self, part: str, done: int, total: int, note: str) -> None:
        share = done / total if total else 0.0
        if share >= 1 or share - self._told.get(part, -1.0) >= 1 / 4:
            self._told[part] = share if share < 1 else -1.0
            self.console.print(f"{part}: {done}/{total} {note}".rstrip(), highlight=False, soft_wrap=True)


def note_of(metrics: Mapping[str, float]) -> str:
    """The numbers beside the bar of a training."""
    parts = []
    for beginning, label in SHOWN:
        found = next(
            (value for name, value in metrics.items() if name == beginning or name.startswith(beginning)), None
        )
        if found is not None:
            parts.append(f"{label} {found:.3g}")
    return "  ".join(parts)
