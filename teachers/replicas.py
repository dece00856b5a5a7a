"""The servers behind one served teacher: who is free, who has died, and whether it is still the same model."""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from teachers import wire
from teachers.errors import TeacherError, TeacherMismatch
from teachers.link import AskAgain, Link, Refused, Reply, answer, stream
from teachers.wire import Ask, BadReply, RowScores

log = logging.getLogger(__name__)

PROBE = Ask(
    prompt_ids=(1,), completion_ids=(2, 3, 4, 5, 6, 7, 8)
)  # ids of any vocabulary; scored to know a model again
PROBE_TOLERANCE = 0.25  # mean nats; bf16 batch effects stay well below on ids this odd, another model does not
RECHECK_S = 5.0  # pause before a replica that was taken out is asked whether it is back
_FINGERPRINT = re.compile(rb'"system_fingerprint":\s*"([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a replica said about itself when it was met.

    Attributes:
      url: its address.
      model: the name that requests carry.
      root: the path or hub name behind the model.
      max_model_len: prompt, completion and one dummy token together; None where the server does not say.
      version: vLLM's, or "unknown".
      fingerprint: vLLM's hash of its configuration, the model's path included; None before vLLM had one.
      no_echo: why it cannot be asked by the streamed echo; None where it can.
      no_candidates: why it cannot score the student's candidates; None where it can.
      compresses: replies are to be compressed, and it does so; vLLM leaves streams, and so the echo, uncompressed.
      probe_logprobs: log-probs of `PROBE`, by which a restarted server is known again.
    """

    url: str
    model: str
    root: str
    max_model_len: int | None
    version: str
    fingerprint: str | None
    no_echo: str | None
    no_candidates: str | None
    compresses: bool
    probe_logprobs: tuple[float, ...]


@dataclass
class Replica:
    """One server, and what this client has on its way to it."""

    url: str
    facts: ServerFacts | None = None
    is_up: bool = False
    next_check_s: float = 0.0
    tokens_in_flight: int = 0

    def check_fingerprint(self, body: bytes) -> None:
        """Compares a reply's fingerprint with the one of the first meeting.

        Raises:
          AskAgain: they differ; the replica must be met again before its scores count.
        """
        found = _FINGERPRINT.search(body)
        known = self.facts.fingerprint if self.facts else None
        if found and known and found[1].decode() != known:
            raise AskAgain(f"{self.url} was restarted with another configuration", is_down=True)


class Replicas:
    """The pool: least-loaded choice, removal of the dead, and their return once they answer as before.

    Lives in one event loop; not safe from other threads.
    """

    def __init__(self, link: Link, model: str | None, *, window: int):
        """Meets nobody yet.

        Args:
          link: the way to the servers.
          model: the served name; None for the first that a server lists.
          window: requests on their way at once, to all of them together.
        """
        self.slots = asyncio.Semaphore(window)
        self._meeting = asyncio.Lock()
        self.link = link
        self.model = model
        self.name = link.settings.teacher
        self.all = [Replica(url) for url in link.settings.urls]
        self._checks: set[asyncio.Task[None]] = set()

    async def pick(self, avoid: Replica | None = None) -> Replica:
        """The replica with the fewest tokens in flight; where none is up, all are met anew.

        Args:
          avoid: a replica that just failed; taken only where there is no other.

        Raises:
          AskAgain: none answers.
          TeacherMismatch: those that answer serve something else.
        """
        up = [replica for replica in self.all if replica.is_up]
        if not up:
            up = await self.meet_all()
        elif len(up) < len(self.all):
            self._check_those_out()
        up = [replica for replica in up if replica is not avoid] or up
        return min(up, key=lambda replica: replica.tokens_in_flight)

    async def meet_all(self) -> list[Replica]:
        """Meets the replicas where none is up, and returns those that then are.

        Raises:
          AskAgain: none answers.
          TeacherError: none that answers will do.
        """
        async with self._meeting:  # whoever waited for it finds them met
            up = [replica for replica in self.all if replica.is_up]
            return up or await self._met()

    async def _met(self) -> list[Replica]:
        outcomes = await asyncio.gather(*(self._facts(replica.url) for replica in self.all), return_exceptions=True)
        errors: list[BaseException] = []
        for replica, outcome in zip(self.all, outcomes, strict=True):  # in their order: the first sets what is right
            try:
                self._admit(replica, outcome)
            except (AskAgain, TeacherError) as error:
                replica.next_check_s = time.monotonic() + RECHECK_S
                errors.append(error)
        up = [replica for replica in self.all if replica.is_up]
        if not up:
            raise next((error for error in errors if isinstance(error, AskAgain)), errors[0])
        for error in errors:
            log.warning("teacher %s goes on without a replica: %s", self.name, error)
        return up

    def _admit(self, replica: Replica, facts: ServerFacts | BaseException) -> None:
        if isinstance(facts, BaseException):
            raise facts
        known = replica.facts or next((other.facts for other in self.all if other.facts), None)
        if known is not None:
            self._check_same(facts, known)
        replica.facts = facts
        replica.is_up = True

    def _check_those_out(self) -> None:
        now = time.monotonic()
        for replica in self.all:
            if not replica.is_up and replica.next_check_s <= now:
                replica.next_check_s = now + RECHECK_S
                task = asyncio.ensure_future(self._check(replica))
                self._checks.add(task)
                task.add_done_callback(self._checks.discard)

    async def _check(self, replica: Replica) -> None:
        try:
            self._admit(replica, await self._facts(replica.url))
        except (AskAgain, TeacherError) as error:
            log.warning("teacher %s: %s stays out: %s", self.name, replica.url, error)
        else:
            log.warning("teacher %s: %s is back", self.name, replica.url)

    def take_out(self, replica: Replica, reason: str) -> bool:
        """Removes a replica until a later check finds it as it was; returns whether it was up until now."""
        was_up, replica.is_up = replica.is_up, False
        replica.next_check_s = time.monotonic() + RECHECK_S
        if was_up:
            log.warning("teacher %s: %s is taken out: %s", self.name, replica.url, reason)
        return was_up

    def _check_same(self, facts: ServerFacts, known: ServerFacts) -> None:
        difference = np.abs(np.subtract(facts.probe_logprobs, known.probe_logprobs)).mean()
        if not difference <= PROBE_TOLERANCE:
            raise TeacherMismatch(
                f"teacher {self.name!r}: {facts.url} ({facts.root}) scores a fixed sequence {difference:.3g} nats per "
                f"token away from what {known.url} ({known.root}) said when it was first asked: other weights. Serve "
                "the model that the run began with, or begin a new run"
            )

    async def _facts(self, url: str) -> ServerFacts:
        entry = self._entry(url, answer(await self.link.exchange(url, "/v1/models")))
        model = str(entry["id"])
        version = await self.link.exchange(url, "/version")
        echo = await self.link.exchange(url, "/v1/completions", wire.echo_body(model, [PROBE], 0))
        no_echo = None
        try:
            (event,) = stream(echo)
            probe = wire.read_echo(event, PROBE, 0)
        except (Refused, ValueError) as error:  # a `BadReply`, or not one event
            if isinstance(error, TeacherError):
                raise
            no_echo = f"{url} does not echo scores: {error}"
            probe, _ = await self._plain_probe(url, model)
        if np.isnan(probe.logprob_T).any():
            raise TeacherMismatch(
                f"{url} answers a test sequence with values that are no log-probs ({dict(probe.flaws)}); serve without "
                "--logprobs-mode raw_logits, and look for nan in the model's weights or dtype"
            )
        compresses = self.link.settings.wants_compression and (await self._plain_probe(url, model))[1]
        fingerprint = _FINGERPRINT.search(echo.body)
        return ServerFacts(
            url=url,
            model=model,
            root=str(entry.get("root") or model),
            max_model_len=entry.get("max_model_len"),
            version=_version(version),
            fingerprint=fingerprint[1].decode() if fingerprint else None,
            no_echo=no_echo,
            no_candidates=await self._no_candidates(url, model, probe.logprob_T),
            compresses=compresses,
            probe_logprobs=tuple(probe.logprob_T.tolist()),
        )

    async def _plain_probe(self, url: str, model: str) -> tuple[RowScores, bool]:
        reply = await self.link.exchange(url, "/v1/completions", wire.plain_body(model, [PROBE], 0))
        try:
            return wire.read_plain(answer(reply)["choices"][0], PROBE, 0), reply.is_compressed
        except (Refused, BadReply, KeyError, IndexError, TypeError) as error:
            raise TeacherMismatch(
                f"{url} gives no prompt log-probs: {error}. Serve the teacher with vLLM 0.20 or later"
            ) from None

    def _entry(self, url: str, listed: Any) -> Mapping[str, Any]:
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not entries:
            raise AskAgain(f"{url} lists no model yet")
        names = [str(entry.get("id")) for entry in entries]
        if self.model is None or self.model in names:
            return entries[names.index(self.model) if self.model else 0]
        raise TeacherMismatch(
            f"teacher {self.name!r}: {url} serves {', '.join(names)}, not {self.model}; set the teacher's model to the "
            "served name, or serve it with --served-model-name"
        )

    async def _no_candidates(self, url: str, model: str, probe_T: Float64[np.ndarray, " T"]) -> str | None:
        reply = await self.link.exchange(url, "/inference/v1/generate", wire.candidates_body(model, PROBE))
        if reply.status in (404, 405):
            return "the server has no /inference/v1/generate; start it with --enable-scale-out (vLLM 0.30 or later)"
        try:
            scores = wire.read_candidates(answer(reply), PROBE)
        except Refused as error:
            return str(error)
        except BadReply as error:
            return f"{error}; prompt_logprob_token_ids came with vLLM 0.32"
        difference = np.abs(scores.logprob_T - probe_T).max()
        return None if difference <= PROBE_TOLERANCE else f"its two routes differ by {difference:.3g} nats"

    async def close(self) -> None:
        """Ends checks and connections."""
        for task in self._checks:
            task.cancel()
        await self.link.close()


def _version(reply: Reply) -> str:
    try:
        return str(wire.parsed(reply.body)["version"]) if reply.status == 200 else "unknown"
    except (BadReply, KeyError, TypeError):
        return "unknown"
