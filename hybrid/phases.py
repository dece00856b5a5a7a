"""What a training step spends its time on, and how far each part is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Tell = Callable[[str, int, int], None]
"""Given a part's name, how much of it is done, and of how much."""


class Phases:
    """Seconds per part of a step, and progress of the part that runs."""

    def __init__(self, tell: Tell | None = None) -> None:
        """`tell` shows progress; None shows nothing."""
        self._tell = tell
        self._seconds: dict[str, float] = {}

    def tell(self, part: str, done: int, total: int) -> None:
        """Shows how far a part is."""
        if self._tell is not None:
            self._tell(part, done, total)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's seconds to a part; a part inside another is not counted twice."""
        began, inside = time.perf_counter(), sum(self._seconds.values())
        self.tell(part, 0, 1)
        try:
            yield
        finally:
            elsewhere = sum(self._seconds.values()) - inside
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began - elsewhere
            self.tell(part, 1, 1)

    @contextmanager
    def counting(self, model: nn.Module, part: str, total: int) -> Iterator[None]:
        """As `timed`, with a tick per forward of `model`: while it generates, that is a token of every response."""
        done = 0

        def tick(*_: object) -> None:
            nonlocal done
            done = min(done + 1, total - 1)
            self.tell(part, done, total)

        handle = model.register_forward_pre_hook(tick) if self._tell is not None else None
        try:
            with self.timed(part):
                yield
        finally:
            if handle is not None:
                handle.remove()

    def take(self) -> dict[str, float]:
        """The seconds of every part since the last call, as `time/PART_s`."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{part}_s": value for part, value in seconds.items()}
