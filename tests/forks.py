"""`hybrid` in processes of its own that tests can stop, kill and starve, without the seconds that its imports take.

One process imports everything once and forks a child for each start; each child is a whole `hybrid` with its own
session. Run as a script, this file is that process.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from teachers.ports import port_of, reserved_port

ROOT = Path(__file__).resolve().parent.parent
CAPABILITY_VERSION_3 = 0x20080522


@dataclass
class Started:
    """A `hybrid` that runs, or has run.

    Attributes:
      pid: of its process, and of the group of those that it starts.
      out: file with what it printed.
    """

    pid: int
    out: Path
    forks: "Forks"

    @property
    def lives(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"

    def printed(self) -> str:
        return self.out.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Waits for its end; the exit code, negative for a signal."""
        while (code := self.forks.ask({"ended": self.pid})) is None:
            time.sleep(0.02)
        return code

    def until(self, happened: Any) -> None:
        """Returns when `happened()` is true; an error if the process ends before."""
        while not happened():
            assert self.lives, self.printed()
            time.sleep(0.02)


class Forks:
    """Starts `hybrid`."""

    def __init__(self, folder: Path) -> None:
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.folder, self.number = folder, 0
        self.meetings: list[socket.socket] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | own,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, *arguments: str | Path, program: str = "hybrid.cli:main", powerless: bool = False, **environment: str
    ) -> Started:
        """Starts `hybrid ARGUMENTS...`.

        Args:
          arguments: of the command line.
          program: module and function, of another program than `hybrid`.
          powerless: without the privileges of root, for whom no folder is read-only.
          environment: added to this process's own.
        """
        self.number += 1
        out = self.folder / f"out_{self.number}.txt"
        argv = [program, *map(str, arguments)]
        request = {"argv": argv, "out": str(out), "powerless": powerless, "env": environment}
        return Started(self.ask(request), out, self)

    def pair(self, *arguments: str | Path, **environment: str) -> tuple[Started, Started]:
        """Two processes of one run, as torchrun would start them."""
        self.meetings.append(reserved_port())
        own = environment | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
        own["MASTER_PORT"] = str(port_of(self.meetings[-1]))
        first, second = (self.start(*arguments, RANK=rank, LOCAL_RANK=rank, **own) for rank in ("0", "1"))
        return first, second


@pytest.fixture(scope="session")
def forks(tmp_path_factory, tiny_cache):
    started = Forks(tmp_path_factory.mktemp("forks"))
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait() == 0
    assert started.process.stdout is not None
    started.process.stdout.close()
    for meeting in started.meetings:
        meeting.close()


def drop_privileges() -> None:
    """Gives up all capabilities: root may then do with files what their modes allow and no more."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def child(request: dict[str, Any]) -> None:
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])
    if request["powerless"]:
        drop_privileges()
    sys.argv = request["argv"]
    module, function = sys.argv[0].split(":")
    getattr(importlib.import_module(module), function)()


def forked(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child(request)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(pid: int) -> int | None:
    """The exit code of a child; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print while they are imported

    import deepspeed  # noqa: F401 - the children find what they need imported
    import torch
    from mlflow import MlflowClient  # noqa: F401

    import hybrid.launch  # noqa: F401

    torch.set_num_threads(1)
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        answer = forked(request) if "argv" in request else code_of(request["ended"])
        if "argv" in request:
            running.add(answer)
        elif answer is not None:
            running.remove(request["ended"])
        print(json.dumps(answer), file=replies, flush=True)
    for pid in running:  # of a test that failed; nobody has waited for them, so the numbers are still theirs
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
