"""Operations that go out in order from a background thread, and wait on disk while nobody takes them."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hybrid.whole_file import write_whole

_log = logging.getLogger(__name__)
_HEAD = 256  # operations that are offered to one send, and are peeked at, not taken, until it has succeeded
_LONGEST_WAIT_S = 300.0


class LostError(ConnectionError):
    """The receiver does not answer; what was to be sent stays in the queue."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that is to reach the receiver; it survives a trip through JSON.

    Attributes:
      kind: what `values` means.
      values: JSON values only.
      step: of metrics; the last one of a history; 0 elsewhere.
      time_ms: when it happened, in milliseconds since 1970.
    """

    kind: Literal["metrics", "params", "tags", "artifact", "table", "resume", "history", "status"]
    values: Mapping[str, Any]
    step: int = 0
    time_ms: int = 0


class Delivery:
    """Sends operations in the order in which they were put, at most one at a time, and never blocks who puts them.

    While the receiver is lost, everything that waits stands in `buffer`, one JSON object a line after a first line with
    the address, so that a crash costs nothing and a later process can send it. An operation that a reachable receiver
    refuses is set aside in `<buffer stem>_refused.jsonl` with the reason, and the next one goes on.

    Args:
      send: takes operations from the front of the queue and returns how many of them it has delivered (at least 1).
        Raises `LostError` where the receiver does not answer; any other error concerns the first of them alone.
      buffer: the file on disk.
      address: JSON values that say where the operations belong; operations found in `buffer` under the same address go
        out first.
      retry_after_s: wait after the first loss; it doubles up to five minutes. A flush does not wait.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Operation]], int],
        buffer: Path,
        address: Mapping[str, str],
        *,
        retry_after_s: float = 5.0,
    ) -> None:
        """Starts with an empty queue, or with what `buffer` holds for this address."""
        self._send = send
        self._buffer = buffer
        self._address = dict(address)
        self._first_wait_s = retry_after_s
        self._wait_s = retry_after_s
        self._retry_at = 0.0
        self._lost = False
        self._running = False
        self._num_attempts = 0
        self._last_loss = 0  # the latest attempt that was lost, by number
        self._torn = False
        self._closed = False
        self._idle = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking")
        self.num_refused = 0
        self._queue: deque[Operation] = deque()
        if buffer.exists():
            address_on_disk, waiting = read_buffer(buffer)
            if address_on_disk == self._address:
                self._queue.extend(waiting)
                self._lost = True
                self._keep()  # whole again: an operation that is appended to a torn line would spoil the file

    @property
    def num_waiting(self) -> int:
        """Operations that were put and not yet delivered."""
        with self._idle:
            return len(self._queue)

    def put(self, operation: Operation) -> None:
        """Appends one operation and returns at once."""
        with self._idle:
            self._queue.append(operation)
            if self._lost:  # also while it is tried again, which may take a minute
                self._keep(operation)
        self._start(now=False)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until everything is delivered, trying once more if the receiver was lost.

        Returns:
          Whether everything is delivered.
        """
        deadline = time.monotonic() + timeout_s
        with self._idle:
            before = self._num_attempts  # the loss of an attempt that is under way already is not this one's
            while (self._queue or self._running) and self._last_loss <= before:  # the file goes after the last record
                self._start(now=True)
                if self._closed and not self._running:
                    break
                if not self._idle.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    break
            return not self._queue

    def close(self, timeout_s: float = 60.0) -> int:
        """Flushes, and leaves on disk what could not be sent.

        Returns:
          How many operations wait in the buffer file.
        """
        self.flush(timeout_s)
        with self._idle:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            if self._queue:
                self._lost = True  # so that the file goes if what is under way arrives after all
                self._keep()
            return len(self._queue)

    def _start(self, *, now: bool) -> None:
        with self._idle:
            if self._closed or self._running or not self._queue or (not now and time.monotonic() < self._retry_at):
                return
            self._running = True
            self._num_attempts += 1
            future = self._pool.submit(self._drain)
        future.add_done_callback(self._after)

    def _drain(self) -> None:
        while True:
            with self._idle:
                head = list(islice(self._queue, _HEAD))
            if not head:
                return
            num_sent = self._send(head)
            with self._idle:
                for _ in range(num_sent):
                    self._queue.popleft()

    def _after(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._idle:
            self._running = False
            if isinstance(error, LostError):
                self._note_loss(error)
            else:
                if error is not None:
                    self._set_aside(self._queue.popleft(), error)
                self._found_again()
            again = bool(self._queue) and not isinstance(error, LostError)
            self._idle.notify_all()
        if again:
            self._start(now=True)

    def _found_again(self) -> None:
        if self._lost and not self._queue:
            self._buffer.unlink(missing_ok=True)
            self._lost = False
            self._wait_s = self._first_wait_s

    def _note_loss(self, error: LostError) -> None:
        if not self._lost:
            _log.warning("%s; the run goes on, its records wait in %s", error, self._buffer)
        self._lost = True
        self._last_loss = self._num_attempts
        self._keep()
        self._retry_at = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _set_aside(self, operation: Operation, error: BaseException) -> None:
        self.num_refused += 1
        refused = self._buffer.with_name(f"{self._buffer.stem}_refused.jsonl")
        _log.warning("the tracking server refuses a %s record (%s); it is kept in %s", operation.kind, error, refused)
        try:
            with refused.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(operation), "error": repr(error)}) + "\n")
        except OSError as trouble:
            _log.warning("it is lost: %s", trouble)

    def _keep(self, latest: Operation | None = None) -> None:
        """Brings the buffer up to date, for `latest` alone by appending it; what the disk refuses waits in memory."""
        try:
            if latest is None or self._torn:
                self._write()
            else:
                with self._buffer.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(latest)) + "\n")
            self._torn = False
        except OSError as error:
            if not self._torn:
                _log.warning("the records that wait for the tracking cannot be kept: %s; they wait in memory", error)
            self._torn = True

    def _write(self) -> None:
        lines = [json.dumps(self._address), *(json.dumps(asdict(operation)) for operation in self._queue)]
        write_whole(self._buffer, "".join(f"{line}\n" for line in lines))


def read_buffer(buffer: Path) -> tuple[dict[str, str], list[Operation]]:
    """Reads the file that a `Delivery` left. A last line that a crash cut off is not counted.

    Returns:
      The address and the operations, oldest first.
    """
    address, *lines = buffer.read_text(encoding="utf-8").splitlines(keepends=True) or ["{}\n"]
    return json.loads(address), [Operation(**json.loads(line)) for line in lines if line.endswith("\n")]
