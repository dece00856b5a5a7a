"""Keeps one command alive exactly as long as the process that asked for it; run as a script, standard library only.

    python -I keeper.py FOLDER PARENT COMMAND...

The command and all it starts get a process group of their own. The group ends when standard input ends, when the
parent is gone (also by SIGKILL, and also where a forked copy of the parent still holds the pipe), or on SIGTERM; and
the kernel sends the command SIGTERM if this keeper itself is killed. A keeper can do so and the parent cannot: a parent
that is killed runs no more code, and the kernel's parent-death signal follows the starting thread, which may end before
its process. FOLDER, which holds the server's key, is removed where the parent, whose number is PARENT, is no longer
there to do it, perhaps not even when this keeper begins.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

GRACE_S = 10.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


def _die_with(keeper: int) -> None:
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGTERM
    )  # vLLM ends its engines on it, which a SIGKILL would leave
    if os.getppid() != keeper:  # which was killed before the kernel knew
        os._exit(1)


def end_group(child: subprocess.Popen, grace_s: float = GRACE_S) -> None:
    """Ends the child and its process group: SIGTERM, and SIGKILL to whatever is left after `grace_s` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (child.poll() is None or _group_lives(child.pid)):
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def keep(folder: str, parent: int, command: list[str]) -> int:
    """Runs `command` until it ends or is no longer wanted; returns its exit status."""
    keeper = os.getpid()
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"."))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _die_with(keeper),
    )
    while child.poll() is None and os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno(), stop_read], [], [], 0.2)
        if stop_read in readable or (readable and not os.read(sys.stdin.fileno(), 1024)):
            break
    end_group(child)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return child.returncode


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
