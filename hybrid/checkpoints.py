"""Checkpoints that are whole or not there: written aside, checked by a checksum, kept by number and by score.

A checkpoint is a folder `checkpoint-STEP`. It is written into `.writing`, flushed to the disk, listed with the SHA-256
of each file in `manifest.json`, and then renamed. A folder without a manifest, or with a file that differs from it, is
torn.
`best.json` names the checkpoint with the best held-out accuracy, which is never deleted; `best` is a link to it. All
processes of a run see the same folder; each calls `begin` and `publish`.
"""

import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors import SafetensorError
from torch.utils.data import Sampler

from hybrid.errors import DataError
from hybrid.together import from_all, from_main, num_processes, rank, wait_for_all
from hybrid.whole_file import write_whole

MANIFEST = "manifest.json"
WRITING = ".writing"
LEAVING = ".leaving"
BEST = "best"
BEST_FILE = "best.json"
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
"""Errors of a disk that is full, broken or not ours."""

BLOCK = 1 << 22
"""Bytes that are read at once."""


def random_state() -> dict[str, Any]:
    """Where the random numbers of this process stand, for `set_random_state`."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the random numbers of this process back to where they stood."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a training, oldest first, torn ones included."""
    found = [path for path in root.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit() and path.is_dir()]
    return sorted(found, key=step_of)


def begin(root: Path) -> Path:
    """An empty folder to write the next checkpoint into; what a kill has left there is removed."""

    def empty() -> Path:
        shutil.rmtree(root / WRITING, ignore_errors=True)
        (root / WRITING).mkdir(parents=True)
        return root / WRITING

    return from_main(empty)


@contextmanager
def writing(root: Path, step: int) -> Iterator[None]:
    """Tells a user that a checkpoint could not be written, and why; the earlier ones stand.

    Raises:
      DataError: the disk is full, or cannot be written to.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = disk_trouble(error)
        if reason is None:
            raise
        shutil.rmtree(root / WRITING, ignore_errors=True)
        last = next((path.name for path in reversed(checkpoints(root)) if problem(path) is None), None)
        stands = f"{last} stands; " if last else ""
        raise DataError(
            f"checkpoint-{step} could not be written to {root} ({reason}); {stands}make room or mend the folder, and "
            "go on with --resume"
        ) from error


@contextmanager
def disk_told(folder: Path) -> Iterator[None]:
    """Tells a user that the disk takes no more of what a run writes, whatever that is.

    Raises:
      DataError: the disk is full, or cannot be written to.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in REFUSALS:
            raise
        if (reason := disk_trouble(error)) is None:
            raise
        name = f" {error.filename}" if isinstance(error, OSError) and error.filename else ""
        raise DataError(
            f"the run could not write{name} in {folder} ({reason}); make room or mend the folder, and go on with "
            f"--resume {folder}"
        ) from error


def disk_trouble(error: BaseException) -> str | None:
    """What the disk refused, in words; None for an error of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # torch and safetensors have errors of their own for a write that failed
    text = str(error)
    if "PytorchStreamWriter" in text or "inline_container" in text:
        return "it took only a part of a file"
    if "os error" in text:
        return text.splitlines()[0]
    return None


def publish(staged: Path, root: Path, keep: int | None) -> Path:
    """Makes a written checkpoint count: flushes it, lists its checksums, renames it, and lets the oldest ones go.

    Args:
      staged: the folder inside `.writing`, to which every process has written its part.
      root: of the training.
      keep: how many are kept, beside the best one; None for all.
    """
    wait_for_all()
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    own = {str(path.relative_to(staged)): fingerprint(path) for path in files[rank() :: num_processes()]}
    listed = {name: value for part in from_all(own) for name, value in sorted(part.items())}
    final = root / staged.name

    def finish() -> Path:
        (staged / MANIFEST).write_bytes(orjson.dumps({"files": listed}, option=orjson.OPT_INDENT_2))
        flush(staged / MANIFEST)
        for folder in {path.parent for path in files} | {staged}:
            flush(folder)
        if final.exists():
            leave(final)
        staged.rename(final)
        flush(root)
        shutil.rmtree(root / WRITING, ignore_errors=True)
        prune(root, keep)
        return final

    return from_main(finish)


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, which is flushed to the disk."""
    flush(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None where every file is as it was written."""
    try:
        listed = orjson.loads((checkpoint / MANIFEST).read_bytes())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (orjson.JSONDecodeError, KeyError):
        return f"its {MANIFEST} cannot be read"
    for name, told in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != told["size"]:
            return f"{name} has {path.stat().st_size} bytes in place of {told['size']}"
        if sha256(path) != told["sha256"]:
            return f"{name} has changed since it was written"
    return None


def newest_good(root: Path, tell: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; None where there is none. Says which ones were passed over, and why."""
    for checkpoint in reversed(checkpoints(root)):
        reason = problem(checkpoint)
        if reason is None:
            return checkpoint
        tell(f"{checkpoint.name} is torn ({reason}); an earlier one is taken")
    return None


def leave(folder: Path) -> None:
    """Removes a folder so that a kill on the way leaves nothing that looks like a checkpoint."""
    aside = folder.with_name(f"{LEAVING}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def prune(root: Path, keep: int | None) -> None:
    """Removes all but the `keep` newest checkpoints and the best one."""
    best = best_checkpoint(root)
    for checkpoint in checkpoints(root)[: -keep if keep else 0]:
        if checkpoint != best:
            leave(checkpoint)


def best_checkpoint(root: Path) -> Path | None:
    """The checkpoint with the best score; None where there is none."""
    noted = best_noted(root)
    return None if noted is None else root / f"checkpoint-{noted['step']}"


def best_value(root: Path) -> float | None:
    """The score of the best checkpoint; None where there is none."""
    noted = best_noted(root)
    return None if noted is None else float(noted["value"])


def best_noted(root: Path) -> dict[str, Any] | None:
    """Step and score of the best checkpoint, in one file, so that a kill does not part them; None without any."""
    path = root / BEST_FILE
    return orjson.loads(path.read_bytes()) if path.is_file() else None


def mark_best(checkpoint: Path, metric: str, value: float) -> None:
    """Notes which checkpoint is the best, and its score; then links `best` to it, for people."""
    root = checkpoint.parent
    noted = {"step": step_of(checkpoint), "metric": metric, "value": value}
    write_whole(root / BEST_FILE, orjson.dumps(noted))
    beside = root / f".{BEST}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(checkpoint.name)
    beside.replace(root / BEST)


def go_back_to_best(root: Path) -> Path:
    """Removes the checkpoints after the best one, from which a resumed training then goes on.

    Raises:
      DataError: there is no best checkpoint, or it is torn.
    """
    best = best_checkpoint(root)
    reason = "there is none" if best is None else problem(best)
    if best is None or reason is not None:
        raise DataError(f"{root} has no best checkpoint to go back to ({reason})")
    for checkpoint in checkpoints(root):
        if step_of(checkpoint) > step_of(best):
            leave(checkpoint)
    return best


class PlacedSampler(Sampler[int]):
    """A sampler whose order in an epoch depends on its seed and the epoch alone, so that a resumed run finds its place.

    TRL's sampler draws one permutation per epoch from a generator of its own, which starts anew when a run is resumed.
    """

    def __init__(self, inner: Any) -> None:
        """Takes TRL's `RepeatSampler`."""
        self.inner = inner

    def set_epoch(self, epoch: int) -> None:
        """Puts the generator where it stands after `epoch` epochs."""
        if self.inner.shuffle:
            self.inner.generator.manual_seed(self.inner.seed)
            for _ in range(epoch):
                torch.randperm(self.inner.num_samples, generator=self.inner.generator)

    def __iter__(self) -> Iterator[int]:
        """The rows of the epoch that was set."""
        return iter(self.inner)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.inner)
