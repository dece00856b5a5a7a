"""Ends a run that stands still, and says why: which process, in which part of a step, for how long.

Every process keeps a small file with what it is doing, and a thread that writes it, whatever the training waits for. So
a process that is stopped (SIGSTOP, a dead machine) falls silent; one that hangs goes on to say in what; and the others
are found waiting for it. The thread also ends a process whose launcher is gone, with a checkpoint after its step.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from transformers import TrainerCallback

from hybrid.together import from_main, num_processes, rank

STALLED = 75
"""Exit code of a run that stood still; what shells call a temporary failure (EX_TEMPFAIL)."""

FOLDER = ".alive"
LAST_WORDS_S = 30.0
"""Seconds that the tracking gets to note the reason."""

UPDATE = "update"
"""The part that is told when its loss is computed, so that it goes on after its last word."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a process last said about itself.

    Attributes:
      rank: of the process.
      part: what it was doing, in words.
      step: the update that it worked on, from 1.
      turn: how many parts it has begun and ended; the process with the fewest is waited for.
      since: when it last got on with that, in seconds since 1970.
      seen: when it last wrote the file.
      host: the machine that it runs on.
      pid: its number there.
    """

    rank: int
    part: str
    step: int
    turn: int
    since: float
    seen: float
    host: str
    pid: int


class Watchdog(TrainerCallback):
    """Watches this process of a run; as a callback of its trainer it knows the step, and `note` tells it the part."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_s: float,
        explain: Mapping[str, str] | None = None,
        last_words: Callable[[str], None] | None = None,
    ) -> None:
        """Watches from `with`, to which all processes come, to its end.

        Args:
          folder: of the training, the same for all processes.
          limit_s: seconds without any progress after which the process is ended; those in which it was itself stopped
            (ctrl-Z, a machine that slept) do not count.
          explain: part -> who does it, such as the teacher's address.
          last_words: given the reason before the end.
        """
        self.folder, self.limit_s = folder / FOLDER, limit_s
        self.explain, self.last_words = dict(explain or {}), last_words
        self._part, self._step, self._turn, self._since, self._beats = "start", 0, 0, time.time(), 0
        self._launcher = os.getppid() if "LOCAL_RANK" in os.environ else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def note(self, part: str, done: int = 0, total: int = 1) -> None:
        """Progress: a part of a step has begun, gone on or ended."""
        now = part if done < total or part == UPDATE else f"after {part}"
        if now != self._part:
            self._part = now
            self._turn += 1
        self._since = time.time()
        self._beats += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step begins."""
        self._step = state.global_step + 1
        self.note("begin of step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The update is made; what follows is evaluation and saving."""
        self.note("end of step")

    def __enter__(self) -> Self:
        """Begins to watch; what an earlier start has left in the folder is removed first."""
        from_main(self._empty)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watches no longer."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the last process finds the folder empty
            (self.folder / f"{rank()}.json").unlink(missing_ok=True)
            self.folder.rmdir()

    def _empty(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink()

    def _watch(self) -> None:
        every = min(5.0, self.limit_s / 5)
        idle_s, beats, before = 0.0, self._beats, time.monotonic()
        while not self._over.wait(every):
            now = time.monotonic()
            idle_s = idle_s + min(now - before, 2 * every) if beats == self._beats else 0.0
            beats, before = self._beats, now
            self._write()
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if idle_s > self.limit_s:
                self._end()

    def _sign(self) -> Sign:
        return Sign(
            rank=rank(),
            part=self._part,
            step=self._step,
            turn=self._turn,
            since=self._since,
            seen=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def _write(self) -> None:
        sign = self._sign()
        beside = self.folder / f".{sign.rank}"
        with contextlib.suppress(OSError):  # a full disk is told by what must be written there
            beside.write_bytes(orjson.dumps(asdict(sign)))
            beside.replace(self.folder / f"{sign.rank}.json")

    def _end(self) -> None:
        """Tells the reason and leaves; the training itself may never come back to be told."""
        own, now = self._sign(), time.time()
        signs = [sign for sign in read(self.folder) if sign.rank != own.rank]
        signs = sorted([*signs, own], key=lambda sign: sign.rank)  # a full disk may have taken none of this one's
        text = f"no progress for {self.limit_s:g} s: {reason(signs, now, self.limit_s, self.explain)}"
        stacks = self.folder.parent / f"stalled_{rank()}.txt"
        try:
            with stacks.open("w", encoding="utf-8") as stream:
                stream.write(f"{text}\n\n")
                stream.flush()
                faulthandler.dump_traceback(stream)
            where = f"stacks: {stacks}"
        except OSError:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            where = "stacks: above"
        who = f"process {rank()}: " if num_processes() > 1 else ""
        sys.stderr.write(f"{who}{text}; {where}; go on with --resume\n")
        if self.last_words is not None:
            speaker = threading.Thread(target=self.last_words, args=(text,), daemon=True)
            speaker.start()
            speaker.join(LAST_WORDS_S)
        here = socket.gethostname()
        for sign in silent(signs, now, self.limit_s):
            if sign.host == here:  # it hears nothing else; later, for this process's exit code is to be the first
                subprocess.Popen(["sh", "-c", f"sleep 1; kill -KILL {sign.pid}"], start_new_session=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STALLED)


def read(folder: Path) -> list[Sign]:
    """What the processes last said; one that ends while its file is read is left out."""
    signs = []
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(FileNotFoundError):
            signs.append(Sign(**orjson.loads(path.read_bytes())))
    return sorted(signs, key=lambda sign: sign.rank)


def silent(signs: Sequence[Sign], now: float, limit_s: float) -> list[Sign]:
    """The processes whose watchdogs have fallen silent, so that not even a thread of theirs runs."""
    return [sign for sign in signs if now - sign.seen > limit_s / 2]


def reason(signs: Sequence[Sign], now: float, limit_s: float, explain: Mapping[str, str]) -> str:
    """Who holds the run up, and in what.

    Args:
      signs: of all processes.
      now: seconds since 1970.
      limit_s: after which a run is ended.
      explain: part -> who does it.
    """

    def doing(sign: Sign) -> str:
        who = f" ({explain[sign.part]})" if sign.part in explain else ""
        return f"in {sign.part!r}{who} of step {sign.step} for {now - sign.since:.0f} s"

    if quiet := silent(signs, now, limit_s):
        return "; ".join(
            f"process {sign.rank} (pid {sign.pid} on {sign.host}) has given no sign of life for {now - sign.seen:.0f} "
            f"s, it was {doing(sign)}"
            for sign in quiet
        )
    late = [sign for sign in signs if sign.turn == min(other.turn for other in signs)]
    if len(signs) == 1:
        return f"the run is {doing(signs[0])}"
    if len(late) == len(signs):
        return f"all {len(signs)} processes are {doing(signs[0])}"
    return "; ".join(f"process {sign.rank} is {doing(sign)}" for sign in late) + "; the others wait for it"
