"""What a run stood on: interpreter, machine, package versions and the state of the source tree."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "trl", "transformers", "accelerate", "deepspeed", "peft", "datasets", "mlflow", "vllm")


def environment() -> dict[str, Any]:
    """Describes this process's surroundings in JSON values; what is not there is None or an empty list.

    Returns:
      `python`, `platform`, `cpu` (name and cores), `gpus` (names), `packages` (name to version) and `git` (commit and
      whether the tree differs from it; both None where this package does not lie in a git checkout).
    """
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git(Path(__file__).resolve()),
    }


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"name": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count()}


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(file: Path) -> dict[str, Any]:
    # A package that was installed into some other checkout's .venv is not tracked there, and so has no commit.
    if _run_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return {"commit": None, "dirty": None}
    status = _run_git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": _run_git(file.parent, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
