"""A relay on the loopback address that counts what passes, byte by byte, whoever speaks through it."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Self


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):  # ended already
            one.shutdown(socket.SHUT_RDWR)  # a thread that reads from it would keep a mere close from taking effect
        one.close()


class WireTap:
    """Relays connections to a server; `sent` and `received` count bytes from the client's side, headers included."""

    def __init__(self, host: str, port: int, *, on_received: Callable[[bytes], None] | None = None):
        """Listens on a free port at once.

        Args:
          host: the server's address.
          port: the server's port.
          on_received: called with each piece of a reply after it was passed on; must not raise.
        """
        self.sent = self.received = 0
        self._target = (host, port)
        self._on_received = on_received
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._target)
            except OSError:
                _end(client)
                continue
            self._sockets += [client, server]
            if self._is_closed:  # which saw no such connection
                _end(client, server)
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_reply), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while piece := source.recv(1 << 16):
                with self._counting:  # before it goes on, so that who has read a reply finds it counted
                    self.sent += 0 if is_reply else len(piece)
                    self.received += len(piece) if is_reply else 0
                sink.sendall(piece)
                if is_reply and self._on_received is not None:
                    self._on_received(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            _end(source, sink)

    def reset(self) -> None:
        """Counts from zero again."""
        with self._counting:
            self.sent = self.received = 0

    def close(self) -> None:
        """Ends all connections."""
        self._is_closed = True
        _end(self._listener, *self._sockets)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes."""
        self.close()


def main() -> None:
    """Relays to a port of this machine; for each line of input, prints the counts since the last."""
    with WireTap("127.0.0.1", int(sys.argv[1])) as tap:
        print(tap.url, flush=True)
        for _ in sys.stdin:
            print(tap.sent, tap.received, flush=True)
            tap.reset()


if __name__ == "__main__":
    main()
