"""Ctrl-C and SIGTERM end a training cleanly: the step is finished, a checkpoint written, and how to go on is told."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from transformers import TrainerCallback

from hybrid.together import largest

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""What a shell expects of a process that such a signal ended."""


class Stop(TrainerCallback):
    """Notes a signal, and stops the trainer after its step with a checkpoint; a second ctrl-C stops at once.

    Attributes:
      received: the signal, or None.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is given one line for the person who waits."""
        self.received: signal.Signals | None = None
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects after the signal."""
        return 0 if self.received is None else EXIT_CODES[self.received]

    def __enter__(self) -> Self:
        """Listens to the signals."""
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Leaves them to whoever listened before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        with contextlib.suppress(RuntimeError):  # Python's own, where the signal came while a line was being written
            self._tell("stopping after this step, with a checkpoint (ctrl-C again stops at once, without one)")

    def agreed(self) -> bool:
        """Whether any process of the run was told to stop; all of them ask, and stop together."""
        number = largest(0 if self.received is None else int(self.received))
        if number and self.received is None:
            self.received = signal.Signals(number)
        return number != 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks the trainer to save and to stop."""
        if self.agreed():
            control.should_save = True
            control.should_training_stop = True
