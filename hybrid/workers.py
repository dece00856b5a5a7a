"""The processes that share a sweep's cells: how many there are, what each may use, and how they are ended."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybrid.engine import gpus

Worker = subprocess.Popen[bytes]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_names(environment: Mapping[str, str], count: int) -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them.

    Args:
      environment: of this process.
      count: GPUs that it sees.
    """
    listed = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return listed[:count] or [str(place) for place in range(count)]


def worker_environments(jobs: int | None, missing: int, environment: Mapping[str, str], count: int) -> list[dict]:
    """The environment of each worker: one GPU for each, or one core.

    Args:
      jobs: workers that are wanted; None is one per GPU, without any one per core. More than there are GPUs share them.
      missing: cells to be done; more workers than that are not started.
      environment: of this process.
      count: GPUs that it sees.
    """
    names = gpu_names(environment, count)
    number = min(jobs or len(names) or cores(), missing)
    threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
    return [
        {**environment, **threads, **({"CUDA_VISIBLE_DEVICES": names[place % len(names)]} if names else {})}
        for place in range(number)
    ]


@contextmanager
def running_workers(
    path: Path, overrides: Sequence[str], folder: Path, *, jobs: int | None, missing: int
) -> Iterator[list[Worker]]:
    """Starts the workers, each with a log of its own, and ends those that still run when it is left, for any reason.

    Args:
      path: the sweep file.
      overrides: settings of the sweep file.
      folder: of the sweep, for the logs.
      jobs: as for `worker_environments`.
      missing: as for `worker_environments`.
    """
    workers: list[Worker] = []
    try:
        for place, environment in enumerate(worker_environments(jobs, missing, os.environ, gpus())):
            command = [sys.executable, "-m", "hybrid.sweep", str(path), *overrides]
            with (folder / f"worker{place}.log").open("ab") as log:
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        yield workers
    finally:
        end_workers(workers)


def end_workers(workers: Sequence[Worker]) -> None:
    """Lets each worker finish its step with a checkpoint; ctrl-C in the meantime ends them at once."""
    try:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
