"""HTTP to vLLM servers: addresses and keys, one request at a time, and what a status means.

Every reply is one of four: an answer, "ask again" (`AskAgain`), "this request is wrong" (`Refused`), or an error that
no retry mends (a `TeacherError`).
"""

import logging
import os
import ssl
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from teachers import wire
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch
from teachers.wire import BadReply

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 4.0  # vLLM closes an idle connection after 5 s: let go first, or a request meets the closing socket
_ASK_AGAIN = frozenset({408, 409, 425, 429})


class AskAgain(Exception):
    """Asking once more, here or at another replica, may help."""

    def __init__(self, reason: str, *, wait_s: float | None = None, is_down: bool = False):
        """Keeps the server's wish (`wait_s`) and whether the replica is to be taken out (`is_down`)."""
        super().__init__(reason)
        self.wait_s = wait_s
        self.is_down = is_down


class Refused(Exception):
    """The server refuses this very request; asking again cannot help, asking for less may."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How servers are spoken to.

    Attributes:
      urls: the replicas' addresses, as `checked_urls` gives them.
      api_key: sent as a bearer token; None for none. Not part of `repr`.
      timeout_s: one request, from its first byte to the last of the reply.
      connections: open at most.
      ca_file: certificates that are trusted instead of the system's; verification itself is never off.
      compress: whether a compressed reply is asked for; None for "yes, unless all replicas are on this machine".
      teacher: the teacher's name, for messages.
    """

    urls: tuple[str, ...]
    api_key: str | None
    timeout_s: float
    connections: int
    ca_file: str | None
    compress: bool | None
    teacher: str

    @property
    def wants_compression(self) -> bool:
        """Whether replies shall be compressed."""
        return self.compress if self.compress is not None else not self.is_local

    @property
    def is_local(self) -> bool:
        """Whether all replicas are on this machine."""
        return all(is_loopback(url) for url in self.urls)

    def __repr__(self) -> str:
        """Without the key."""
        return f"LinkSettings(urls={self.urls}, teacher={self.teacher!r})"


def read_api_key(env: str, file: str | os.PathLike[str] | None) -> str | None:
    """The API key from a private file or the environment; never from a setting, which would be logged.

    Args:
      env: name of the environment variable.
      file: a file that holds nothing but the key and that only its owner may read; goes before `env`.

    Returns:
      The key, or None where there is neither.

    Raises:
      TeacherError: the file is missing, empty, or readable by others.
    """
    if file is None:
        return os.environ.get(env) or None
    path = Path(file)
    if not path.is_file():
        raise TeacherError(f"the API key file {path} does not exist; write the key into it and chmod it to 600")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise TeacherError(f"the API key file {path} can be read by others; run: chmod 600 {path}")
    key = path.read_text().strip()
    if not key:
        raise TeacherError(f"the API key file {path} is empty")
    return key


def trusted(ca_file: str | None) -> ssl.SSLContext | Literal[True]:
    """What a server's certificate is verified against; True is the system's.

    Raises:
      TeacherError: the file cannot be read, or holds no certificate.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl's own errors too
        raise TeacherError(
            f"ca_file {ca_file} cannot be used ({error.strerror or error}); name a readable file of certificates in "
            "PEM form, or leave it out for the system's"
        ) from error


def checked_urls(url: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses without a trailing slash or /v1.

    Raises:
      TeacherError: an address is no http(s) one, carries credentials, or there is none.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    if not urls:
        raise TeacherError("the teacher has no url; give one server's address or a list of replicas")
    for one in urls:
        parts = urlsplit(one)
        if parts.username or parts.password:
            raise TeacherError(
                f"the teacher url of {parts.hostname} carries credentials; put the key in the environment"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TeacherError(f"teacher url {one!r} must begin with http:// or https:// and name a host")
    return tuple(one.rstrip("/").removesuffix("/v1") for one in urls)


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass
class Reply:
    """One HTTP exchange, as far as it got.

    Attributes:
      url: the server's address.
      status: the HTTP status; 0 where none came.
      body: what came of the body, decompressed.
      broken: why the exchange ended before its end; None where it did not.
      is_compressed: whether the body travelled compressed.
      wait_s: how long the server wants to be left alone.
    """

    url: str
    status: int = 0
    body: bytes = b""
    broken: str | None = None
    is_compressed: bool = False
    wait_s: float | None = None


class Link:
    """One HTTP session to all replicas, with reused connections. Lives in one event loop."""

    def __init__(self, settings: LinkSettings):
        """Opens nothing yet; the first request does."""
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None
        if settings.api_key and any(url.startswith("http://") and not is_loopback(url) for url in settings.urls):
            log.warning("teacher %s: the API key travels unencrypted to a http:// address", settings.teacher)

    async def exchange(self, url: str, path: str, body: bytes | None = None) -> Reply:
        """One request, a POST where it has a body; a broken connection is part of the reply."""
        session = self._opened()
        parts: list[bytes] = []
        reply = Reply(url)
        try:
            async with session.request("GET" if body is None else "POST", url + path, data=body) as response:
                reply.status = response.status
                reply.wait_s = _seconds(response.headers.get("Retry-After"))
                reply.is_compressed = "Content-Encoding" in response.headers
                async for part in response.content.iter_any():
                    parts.append(part)  # noqa: PERF401 - a comprehension would lose what came before a break
        except TimeoutError:
            reply.broken = f"no answer within {self.settings.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reply.broken = f"{type(error).__name__}: {error}"
        reply.body = b"".join(parts)
        return reply

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self.settings
            headers = {"Content-Type": "application/json", "User-Agent": "hybrid-teacher"}
            if settings.api_key:
                headers["Authorization"] = f"Bearer {settings.api_key}"
            if not settings.wants_compression:
                headers["Accept-Encoding"] = "identity"
            tls = trusted(settings.ca_file)
            connector = aiohttp.TCPConnector(limit=settings.connections, keepalive_timeout=KEEP_ALIVE_S, ssl=tls)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
                trust_env=not settings.is_local,
            )
        return self._session

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def answer(reply: Reply) -> Any:
    """The parsed body of a good reply.

    Raises:
      AskAgain: the connection broke, or the server is busy or ailing.
      Refused: the request is wrong.
      BadReply: the body is no JSON.
      TeacherError: the key is wrong, an id is unknown to the teacher, or k is over the server's limit.
    """
    if reply.broken:
        raise AskAgain(f"{reply.url}: {reply.broken}", is_down=True)
    if reply.status != 200:
        _raise_status(reply, reply.status, _message(reply.body))
    return wire.parsed(reply.body)


def stream(reply: Reply) -> Iterator[bytes]:
    """The events of a streamed reply, up to the first that reports an error or to where the connection broke.

    Raises:
      As `answer`, after the events that came before.
    """
    if reply.status not in (0, 200):
        _raise_status(reply, reply.status, _message(reply.body))
    for event in wire.events(reply.body):
        error = wire.event_error(event)
        if error:
            _raise_status(reply, *error)
        yield event
    if reply.broken:
        raise AskAgain(f"{reply.url}: {reply.broken}", is_down=True)


def _raise_status(reply: Reply, status: int, message: str) -> None:
    text = f"{reply.url} answers {status}: {message}"
    if status in (401, 403):
        raise TeacherError(f"{text}. The teacher's API key is missing or wrong; set it in the environment")
    if status == 404 and "model" in message:
        raise AskAgain(text, is_down=True)  # meeting it again tells what it serves now
    if status in _ASK_AGAIN or status >= 500:
        raise AskAgain(text, wait_s=reply.wait_s)
    if "logprobs" in message and "max allowed" in message:
        raise TeacherCannot(f"{text}. Serve with a larger --max-logprobs, or ask for a smaller top_k")
    if "vocabulary" in message or "out-of-vocab" in message:
        raise TeacherMismatch(
            f"{text}. Student and teacher have different vocabularies; give a teacher of the same one"
        )
    raise Refused(text)


def _message(body: bytes) -> str:
    try:
        value = wire.parsed(body)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (BadReply, AttributeError):
        return body[:200].decode(errors="replace")


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None  # a date; the client's own back-off will do
