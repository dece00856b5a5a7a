"""Where the tiny models are kept: made once, by one process, and never half finished."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from transformers.utils import logging as transformers_logging

from hybrid.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called with what is being made, the steps done and the most steps there can be."""

FACTS_FILE = "tiny.json"
"""In a finished folder: the recipe, the steps taken and the validation probability reached."""


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The folder of the tiny models: `cache_dir`, else `$HYBRID_CACHE`, else the platform's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir)
    named = os.environ.get("HYBRID_CACHE")
    return Path(named) if named else user_cache_path("hybrid-rl", appauthor=False)


def made_once(
    name: str,
    make: Callable[[Path, Progress], None],
    *,
    what: str,
    max_steps: int,
    progress: Progress | None,
    cache_dir: Path | str | None,
) -> Path:
    """Returns the cached folder `name`, and makes it first where the cache has none.

    Two processes that ask at once build it once; a build that is cut off leaves nothing that looks finished.

    Args:
      name: of the folder; it tells the content apart from any other.
      make: fills an empty folder, `FACTS_FILE` included; with a seed of its own choice and one thread.
      what: is being made, for the progress.
      max_steps: of the making, for the progress.
      progress: told how far it is.
      cache_dir: where to keep it; see `cache_root`.

    Raises:
      DataError: the cache folder cannot be written.
    """
    root = cache_root(cache_dir)
    final = root / name
    if (final / FACTS_FILE).is_file():
        return final
    report = progress or _silent
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            report(f"{what}: waiting for another process", 0, max_steps)
            lock.acquire()
    except OSError as error:
        raise DataError(
            f"the cache folder {root} of the tiny models cannot be written ({error.strerror}); "
            "set HYBRID_CACHE to a folder that can"
        ) from error
    with lock:
        if not (final / FACTS_FILE).is_file():
            _fill(final, lambda folder: make(folder, report))
    return final


def _fill(final: Path, make: Callable[[Path], None]) -> None:
    """Makes a temporary folder beside `final` and renames it; whatever stood at `final` was not finished."""
    with tempfile.TemporaryDirectory(prefix=f"{final.name}.partial-", dir=final.parent) as partial:
        folder = Path(partial) / "model"
        folder.mkdir()
        with _alone():
            make(folder)
        if final.exists():
            shutil.rmtree(final)
        folder.replace(final)


@contextmanager
def _alone() -> Iterator[None]:
    """One thread (faster at this size, and the same sums on every machine), own random numbers, no bar over ours."""
    num_threads, shown = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)
        if shown:
            transformers_logging.enable_progress_bar()


def _silent(what: str, done: int, total: int) -> None:
    """The progress callback of those who want none."""
