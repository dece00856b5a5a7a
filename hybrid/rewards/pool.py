"""Workers that can be killed: every question is answered within a limit, whatever a student wrote.

Neither threads nor signals can stop a verifier that hangs in one long multiplication, and a process pool of the
standard library does not give a hung worker back. Here each worker is a plain child process (`worker.py`, started by
exec, so torch is neither forked nor loaded), killed when it is late and replaced when next needed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

_START_S = 120.0
_WALL_FACTOR = 4  # a worker counts its processor time; the clock on the wall must not fail it on a busy machine
_WORKER = Path(__file__).with_name("worker.py")


class WorkerPool:
    """A few worker processes, started when first asked, closed with the pool or at exit; any thread may ask."""

    def __init__(self, kind: Literal["math", "gym"], *, workers: int, limit_s: float) -> None:
        """Starts nothing yet.

        Args:
          kind: which library the workers hold ready.
          workers: how many processes may run at once, at least 1.
          limit_s: seconds of processor time that one question may take; it may last four times as long by the clock.
        """
        self._kind = kind
        self._workers = workers
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._owner = 0
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._closer: weakref.finalize | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Puts one question.

        Args:
          request: a JSON object that `worker.py` understands.

        Returns:
          The worker's reply, or None where the question took longer than the limit or twice killed its worker (out
          of memory, out of stack).

        Raises:
          RuntimeError: a worker does not start, or it raised; the message holds what it said.
        """
        idle = self._slots()
        line = json.dumps(request).encode() + b"\n"
        worker = idle.get()
        try:
            for _ in range(2):
                worker = worker or _Worker(self._kind, self._limit_s)
                answer = worker.ask(line, _WALL_FACTOR * self._limit_s)
                if answer is not None:
                    break
                late, worker = worker.late, None
                if late:
                    break
        finally:
            idle.put(worker)
        if answer is not None and "error" in answer:
            raise RuntimeError(f"the verifier raised {answer['error']}")
        return answer

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Puts several questions, as many at once as there are workers; replies come in the order of the questions."""
        if len(requests) < 2 or self._workers == 1:
            return [self.ask(request) for request in requests]
        with ThreadPoolExecutor(min(self._workers, len(requests)), thread_name_prefix="verifier") as threads:
            return list(threads.map(self.ask, requests))

    def close(self) -> None:
        """Ends the workers; a later question starts new ones."""
        with self._lock:
            if self._closer is not None:
                self._closer()
            self._owner = 0

    def _slots(self) -> "queue.LifoQueue[_Worker | None]":
        with self._lock:
            if self._owner != os.getpid():  # first use, or a forked child, which must not share its parent's pipes
                self._owner = os.getpid()
                self._idle = queue.LifoQueue()
                for _ in range(self._workers):
                    self._idle.put(None)
                self._closer = weakref.finalize(self, _close_all, self._idle, self._owner)
            return self._idle


class _Worker:
    """One child process and the pipes to it."""

    def __init__(self, kind: str, limit_s: float) -> None:
        self.late = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), kind, str(limit_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self.ask(b"", _START_S) is None:
            raise RuntimeError(
                f"a verifier process does not start (exit code {self._process.returncode}); see what "
                f"`{sys.executable} -P {_WORKER} {kind} {limit_s}` says"
            )

    def ask(self, line: bytes, limit_s: float) -> dict[str, Any] | None:
        """The reply, or None after which the process is gone; `late` says whether it was killed for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.late = False
        timer = threading.Timer(limit_s, self._kill_late)
        timer.daemon = True
        timer.start()
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        timer.cancel()
        timer.join()  # it may be at it, after all: then this question has its reply, and the next finds no process
        if reply.endswith(b"\n"):
            return json.loads(reply)
        self.close()
        self.late = self.late or self._process.returncode == -signal.SIGPROF
        return None

    def close(self) -> None:
        """Kills the process and lets its pipes go."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _kill_late(self) -> None:
        self.late = True
        self._process.kill()


def _close_all(idle: "queue.LifoQueue[_Worker | None]", owner: int) -> None:
    while owner == os.getpid() and not idle.empty():
        worker = idle.get_nowait()
        if worker is not None:
            worker.close()
