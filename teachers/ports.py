"""A port for a server that starts later, which nobody else is given in between."""

import socket

LOOPBACK = "127.0.0.1"


def reserved_port() -> socket.socket:
    """A socket that keeps a free port of the loopback address until it is closed: `getsockname()[1]`.

    It does not listen. So a server that sets SO_REUSEADDR, as servers do, can listen at the port, and do so again; and
    the kernel gives the port to nobody who asks for any port, to listen at or to connect from.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((LOOPBACK, 0))
    return kept


def port_of(kept: socket.socket) -> int:
    """The port that a socket keeps."""
    return kept.getsockname()[1]
