"""A reward that holds a training in a step while a file is there, so that a test meets it where it wants to."""

import os
import time
from pathlib import Path

REWARDS = (
    "rewards=[{name: exact, pattern: '#(\\d+)$'}, {name: python, path: 'tests.integration.held:held', weight: 0.0}]"
)
"""The quickstart's reward, and beside it this one, which is worth nothing."""


def held(completions, trainer_state=None, **columns):
    """Zeros; in the training step `HELD_STEP` (from 0) not before the file `HELD_FILE` is gone."""
    if trainer_state is not None and str(trainer_state.global_step) == os.environ.get("HELD_STEP"):
        while Path(os.environ["HELD_FILE"]).exists():
            time.sleep(0.02)
    return [0.0] * len(completions)


class Hold:
    """Holds trainings with `REWARDS` in one step, until it is let go.

    Attributes:
      environment: of the processes of such a training.
      step: whose responses are being judged; those of as many steps before are recorded.
    """

    def __init__(self, file: Path, step: int) -> None:
        file.touch()
        self.file, self.step = file, step
        self.environment = {"HELD_STEP": str(step), "HELD_FILE": str(file)}

    def let_go(self) -> None:
        self.file.unlink()
