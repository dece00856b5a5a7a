"""A run's folder belongs to one training at a time: of two that write the same checkpoints none would be whole."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import ConfigError


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other trainings out of a folder for as long as this process is in it.

    The lock is the process's own, so it goes with it however that ends, and no child that lives on holds it.

    Args:
      folder: of the run. Where it cannot be written, that is told by what is written next.

    Raises:
      ConfigError: another process trains there; names it.
    """
    place = folder / "in_use"
    if not os.access(folder, os.W_OK):
        yield
        return
    with place.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"{folder}: process {place.read_text(encoding='utf-8')} trains in this folder; wait for its end, or "
                "stop it, and go on with --resume"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
