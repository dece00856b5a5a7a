"""A teacher behind HTTP: any stock `vllm serve` of 0.20 or later, one or several replicas; vllm is not imported.

Rows go out by token ids, nothing is re-tokenised. Answers are checked for what they are about (the very ids that were
sent), how many they are, and which model gave them, before any of them counts.
"""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar

from teachers import wire
from teachers.asking import Run, assembled, check_rows, unique_asks
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch, TeacherUnavailable
from teachers.link import AskAgain, Link, LinkSettings, Refused, answer, checked_urls, read_api_key, stream, trusted
from teachers.protocol import SAMPLED, Row, Want
from teachers.replicas import Replica, Replicas, ServerFacts
from teachers.scores import TeacherScores
from teachers.wire import Ask, BadReply, RowScores

T = TypeVar("T")

MAX_TOKENS = 65_536  # ids of one request; a longer row goes alone
MAX_BACKOFF_S = 30.0


class VllmTeacher:
    """Scores completions with a served model; see `teachers.protocol.Teacher`."""

    needs_extra_tokens = 1
    """A server generates one token after each row that it scores."""

    is_remote = True
    """It works while this process does something else."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str | None = None,
        *,
        name: str = "teacher",
        api_key_env: str = "HYBRID_TEACHER_API_KEY",
        api_key_file: str | os.PathLike[str] | None = None,
        window: int = 16,
        max_rows: int = 16,
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        policy: Literal["mask", "stop"] = "mask",
        temperature: float = 1.0,
        vocab_size: int | None = None,
        ca_file: str | None = None,
        compress: bool | None = None,
        way: Literal["auto", "echo", "plain"] = "auto",
    ):
        """Opens no connection yet; the first row does.

        Args:
          url: the server's address, or those of several replicas of one model.
          model: the served name; None for the first that the server lists.
          name: for messages and metrics.
          api_key_env: environment variable that holds the API key.
          api_key_file: a file only its owner may read, with the key in it; goes before `api_key_env`.
          window: requests on their way at once.
          max_rows: rows of one request; a request that is answered in part is asked again for the rest alone.
          timeout_s: seconds for one request.
          retries: how often a row is asked for again before it counts as failed.
          backoff_s: seconds before the first retry, doubled for each further one and shortened by up to a half at
            random, so that clients of one server do not come back together.
          policy: "mask" takes failed rows out and counts them, "stop" raises at the first. Where every row fails, both
            raise.
          temperature: must be 1: vLLM scores prompts at temperature 1 whatever it is asked for.
          vocab_size: ids that the teacher knows; a row with another is never sent. None leaves the check to the server,
            which vLLM 0.32 does not survive for an id that is just one too large.
          ca_file: certificates to trust instead of the system's; verification is never off.
          compress: ask for compressed replies; None for "yes, unless the server is on this machine".
          way: how scores are asked for; "auto" takes the cheapest that the server offers.

        Raises:
          TeacherError: a setting is out of its range.
          TeacherCannot: `temperature` is not 1.
        """
        if temperature != 1.0:
            raise TeacherCannot(
                f"teacher {name!r} is asked for temperature {temperature}, and vLLM ignores the temperature when it "
                "scores a prompt: its log-probs hold at 1. Sample and train at temperature 1, or use a local teacher"
            )
        if policy not in ("mask", "stop"):
            raise TeacherError(f"policy must be 'mask' or 'stop'; got {policy!r}")
        positive = {"window": window, "max_rows": max_rows, "timeout_s": timeout_s}
        for setting, value in {**positive, "retries": retries + 1, "backoff_s": backoff_s + 1}.items():
            if value <= 0 or (setting == "backoff_s" and value < 1):
                raise TeacherError(f"{setting} of teacher {name!r} is too small")
        trusted(ca_file)  # a wrong file is told of now, not at the first request
        self.name = name
        self._settings = LinkSettings(
            urls=checked_urls(url),
            api_key=read_api_key(api_key_env, api_key_file),
            timeout_s=timeout_s,
            connections=window,
            ca_file=ca_file,
            compress=compress,
            teacher=name,
        )
        self._model = model
        self._vocab_size = vocab_size
        self._window = window
        self._max_rows = max_rows
        self._retries = retries
        self._backoff_s = backoff_s
        self._policy = policy
        self._way = way
        self._start = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._replicas: Replicas | None = None

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores `rows` and waits for the answer; see `TeacherScores` for shapes and units.

        Raises:
          TeacherCannot: no replica can deliver `want`; the message says why and what can.
          TeacherMismatch: a server has another model, or another vocabulary than the student.
          TeacherUnavailable: no row could be scored, or one could not and the policy is "stop".
        """
        future = self.submit(rows, want)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, rows: Sequence[Row], want: Want = SAMPLED) -> Future[TeacherScores]:
        """Sends `rows` off and returns at once, so that the student works on meanwhile.

        Raises:
          As `score`; what the servers answer is raised by the future's `result`.
        """
        check_rows(self.name, rows, want, self._vocab_size)
        return self._sent(self._score(tuple(rows), want))

    def facts(self) -> list[ServerFacts]:
        """Meets all replicas and returns what those that answer say about themselves.

        Raises:
          TeacherUnavailable: none answers.
          TeacherMismatch: none that answers serves the model.
        """
        return self._sent(self._facts()).result()

    def close(self) -> None:
        """Ends the connections and the thread; rows on their way are given up."""
        with self._start:
            if self._loop is None or self._thread is None:
                return
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = self._replicas = None

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes."""
        self.close()

    def _sent(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Hands work to the loop, under the lock, so that a `close` comes before it or ends it."""
        with self._start:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._replicas = Replicas(Link(self._settings), self._model, window=self._window)
                self._thread = threading.Thread(target=self._loop.run_forever, name=f"{self.name}-http", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def _pool(self) -> Replicas:
        assert self._replicas is not None
        return self._replicas

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._pool.close()

    async def _facts(self) -> list[ServerFacts]:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                up = await self._pool.meet_all()
        except (AskAgain, TimeoutError) as error:
            raise self._unavailable(str(error) or "no answer in time") from None
        return [replica.facts for replica in up if replica.facts is not None]

    async def _score(self, rows: tuple[Row, ...], want: Want) -> TeacherScores:
        asks, owner_B = unique_asks(rows, want)
        run = Run(asks=asks, top_k=want.top_k, by_candidates=False)
        run.count("duplicate_rows", sum(owner is not None for owner in owner_B) - len(asks))
        if asks:
            facts = await self._first_facts(run)
            self._refuse_long(run, facts.max_model_len)
            run.by_candidates = self._takes_candidates(facts, want)
            await self._ask_all(run, self._chunks(run))
            if not run.scores:
                raise self._unavailable(next(iter(run.failures.values())))
        return assembled(rows, owner_B, run, want)

    async def _first_facts(self, run: Run) -> ServerFacts:
        for attempt in range(self._retries + 1):
            try:
                replica = await self._picked(None)
            except AskAgain as error:
                if attempt == self._retries:
                    raise self._unavailable(str(error)) from None
                await self._pause(run, attempt, error.wait_s)
            else:
                assert replica.facts is not None
                return replica.facts
        raise AssertionError("the last attempt returns or raises")

    def _takes_candidates(self, facts: ServerFacts, want: Want) -> bool:
        if want.candidates_BTK is None:
            return facts.no_candidates is None and not want.top_k and self._way == "auto"
        if facts.no_candidates is not None:
            raise TeacherCannot(
                f"teacher {self.name!r} cannot score the student's candidates: {facts.no_candidates}. Use its own "
                "top_k or the sampled tokens, serve it with vLLM 0.32 or later on a GPU, or use a local teacher"
            )
        return True

    def _refuse_long(self, run: Run, limit: int | None) -> None:
        for key, ask in enumerate(run.asks):
            # the server generates one token after the row, so a row that just fills the context is refused too
            if limit is not None and len(ask.ids) + 1 > limit:
                run.failures[key] = (
                    f"{len(ask.prompt_ids)} prompt and {len(ask.completion_ids)} completion tokens need a context of "
                    f"{len(ask.ids) + 1}, and teacher {self.name!r} is served with {limit}; raise --max-model-len"
                )
                if self._policy == "stop":
                    raise TeacherMismatch(run.failures[key])

    def _chunks(self, run: Run) -> list[list[int]]:
        # equal prompts stand together, so that a server that caches prefixes computes each once
        keys = sorted(set(range(len(run.asks))) - set(run.failures), key=lambda key: run.asks[key].prompt_ids)
        limit = 1 if run.by_candidates else self._max_rows
        if len(self._settings.urls) > 1:
            limit = min(limit, -(-len(keys) // (2 * len(self._settings.urls))))
        chunks: list[list[int]] = []
        room = 0
        for key in keys:
            length = len(run.asks[key].ids)
            if not chunks or len(chunks[-1]) == limit or length > room:
                chunks.append([])
                room = MAX_TOKENS
            chunks[-1].append(key)
            room -= length
        return chunks

    async def _ask_all(self, run: Run, chunks: Sequence[Sequence[int]]) -> None:
        tasks = [asyncio.ensure_future(self._ask(run, chunk)) for chunk in chunks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, run: Run, keys: Sequence[int]) -> None:
        """Fills in scores or failures of `keys`."""
        waiting, avoid = list(keys), None
        for attempt in range(self._retries + 1):
            replica = None
            try:
                async with self._pool.slots:
                    replica = await self._picked(avoid)
                    await self._exchange(run, replica, waiting)
            except (AskAgain, BadReply, Refused) as error:
                waiting = [key for key in waiting if key not in run.scores]
                if isinstance(error, Refused) and len(waiting) > 1:
                    half = len(waiting) // 2
                    return await self._ask_all(run, [waiting[:half], waiting[half:]])
                if isinstance(error, AskAgain) and error.is_down and replica is not None:
                    run.count("replicas_lost", self._pool.take_out(replica, str(error)))
                if isinstance(error, Refused) or attempt == self._retries or run.is_dead:
                    return self._give_up(run, waiting, str(error))
                avoid = replica
                await self._pause(run, attempt, error.wait_s if isinstance(error, AskAgain) else None)
            else:
                run.is_dead = False
                return None
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, run: Run, keys: Sequence[int], reason: str) -> None:
        # where the whole teacher is gone, what has not been sent yet gets one try, not all retries
        run.is_dead = not any(replica.is_up for replica in self._pool.all)
        run.failures.update(dict.fromkeys(keys, reason))
        if self._policy == "stop":
            raise TeacherUnavailable(
                f"teacher {self.name!r} could not score a row, and its policy is to stop: {reason}"
            )

    async def _picked(self, avoid: Replica | None) -> Replica:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._pool.pick(avoid)
        except TimeoutError:
            raise AskAgain(f"no replica answered within {self._settings.timeout_s:g} s") from None

    async def _pause(self, run: Run, attempt: int, wait_s: float | None) -> None:
        run.count("retries")
        pause_s = self._backoff_s * 2**attempt if wait_s is None else wait_s
        await asyncio.sleep(min(pause_s, MAX_BACKOFF_S) * random.uniform(0.5, 1.0))

    async def _exchange(self, run: Run, replica: Replica, keys: Sequence[int]) -> None:
        """One request for `keys`; what it answers well counts, also where the rest of it fails."""
        assert replica.facts is not None
        facts, asks = replica.facts, [run.asks[key] for key in keys]
        is_echo = facts.no_echo is None and self._way != "plain" and not (facts.compresses and self._way == "auto")
        if run.by_candidates:
            path, body = "/inference/v1/generate", wire.candidates_body(facts.model, asks[0])
        elif is_echo:
            path, body = "/v1/completions", wire.echo_body(facts.model, asks, run.top_k)
        else:
            path, body = "/v1/completions", wire.plain_body(facts.model, asks, run.top_k)
        num_tokens = sum(len(ask.ids) for ask in asks)
        replica.tokens_in_flight += num_tokens
        try:
            reply = await self._pool.link.exchange(replica.url, path, body)
        finally:
            replica.tokens_in_flight -= num_tokens
        run.count("requests")
        run.count("bytes_sent", len(body))
        run.count("bytes_received", len(reply.body))
        replica.check_fingerprint(reply.body)
        if run.by_candidates:
            run.scores[keys[0]] = wire.read_candidates(answer(reply), asks[0])
        elif is_echo:
            self._read(run, keys, ((wire.event_index(event), event) for event in stream(reply)), wire.read_echo)
        else:
            choices = answer(reply).get("choices", ())
            self._read(run, keys, ((choice.get("index"), choice) for choice in choices), wire.read_plain)

    def _read(
        self,
        run: Run,
        keys: Sequence[int],
        parts: Iterable[tuple[object, Any]],
        read: Callable[[Any, Ask, int], RowScores],
    ) -> None:
        """Takes the rows of one reply, in whatever order they come; a bad one does not spoil the others."""
        problem = ""
        for index, part in parts:
            try:
                place = _place(index, len(keys))
                run.scores[keys[place]] = read(part, run.asks[keys[place]], run.top_k)
            except BadReply as error:
                problem = str(error)
        num_missing = sum(key not in run.scores for key in keys)
        if num_missing:
            raise BadReply(problem or f"the server left out {num_missing} of {len(keys)} rows")

    def _unavailable(self, reason: str) -> TeacherUnavailable:
        urls = ", ".join(self._settings.urls)
        return TeacherUnavailable(
            f"teacher {self.name!r} at {urls} scored no row: {reason}. Look at the server's log; raise timeout_s or "
            "retries if it needs longer"
        )


def _place(index: object, num_rows: int) -> int:
    if not isinstance(index, int) or not 0 <= index < num_rows:
        raise BadReply(f"the reply has a choice {index!r} where {num_rows} were asked for")
    return index
