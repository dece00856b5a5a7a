"""Files that other processes read while a run goes on, and that a later start trusts: whole, or as they were."""

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Puts `content` in the place of what stood at `path`; who reads meanwhile, or after a kill, finds either.

    Raises:
      OSError: the disk does not take it; what stood there stands.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
