"""Held-out accuracy of a model behind a vLLM server: it answers over HTTP, and nothing but the verifiers runs here."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from datasets import Dataset

from hybrid.errors import DataError
from hybrid.evaluate import Evaluation, Report, Sampling, judged
from hybrid.pictures import PICTURE_COLUMNS
from teachers.link import AskAgain, Link, LinkSettings, Refused, answer, checked_urls, read_api_key
from teachers.wire import BadReply

API_KEY_ENV = "HYBRID_TEACHER_API_KEY"
"""Holds the server's key, as for a teacher."""

ATTEMPTS = 5
FIRST_WAIT_S = 0.5
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Answered:
    """One response: its text, its tokens, and whether it was cut at the limit."""

    text: str
    num_tokens: int
    is_truncated: bool


def evaluate_served(
    url: str,
    model: str | None,
    prompts: Dataset,
    rewards: Sequence[Any],
    sampling: Sampling,
    chat_template_kwargs: Mapping[str, Any],
    report: Report | None = None,
) -> tuple[str, Evaluation]:
    """Samples K responses to each prompt from a server and scores them here.

    Each response is a request with a seed of its own, so that the answers hang neither on the batch size nor on the
    order in which they come, as far as the server's arithmetic is the same in every batch.

    Args:
      url: of the server.
      model: as the server calls it; None is the first that it has.
      prompts: rows with `prompt` and the rewards' columns; no pictures.
      rewards: reward functions with a `weight`; they see no token ids.
      sampling: how to draw; `batch_size` requests are under way at once.
      chat_template_kwargs: for chat prompts.
      report: progress.

    Returns:
      The model's name at its address, and what came out.

    Raises:
      DataError: no prompts, pictures in them, or the server does not answer as it should.
      TeacherError: the address or the key is wrong.
      RewardError: a reward fails.
    """
    if len(prompts) == 0:
        raise DataError("the held-out set is empty; evaluate.prompts or evaluate.data must leave at least one prompt")
    if set(PICTURE_COLUMNS).intersection(prompts.column_names):
        raise DataError("a served model is asked with prompts of text; for pictures, load it with --checkpoint")
    rows = [dict(row) for row in prompts for _ in range(sampling.samples)]  # pyright: ignore[reportArgumentType, reportCallIssue]
    settings = LinkSettings(
        urls=checked_urls(url),
        api_key=read_api_key(API_KEY_ENV, None),
        timeout_s=TIMEOUT_S,
        connections=sampling.batch_size,
        ca_file=None,
        compress=None,
        teacher="evaluation",
    )
    name, answers = asyncio.run(_ask_all(settings, model, rows, sampling, chat_template_kwargs, report))
    found = judged(
        rows,
        [one.text for one in answers],
        [[] for _ in answers],
        [one.num_tokens for one in answers],
        [one.is_truncated for one in answers],
        rewards,
        sampling,
    )
    return f"{name} at {settings.urls[0]}", found


async def _ask_all(
    settings: LinkSettings,
    model: str | None,
    rows: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    chat_template_kwargs: Mapping[str, Any],
    report: Report | None,
) -> tuple[str, list[Answered]]:
    link = Link(settings)
    url, num_done, gate = settings.urls[0], 0, asyncio.Semaphore(sampling.batch_size)

    async def ask(place: int, name: str) -> Answered:
        nonlocal num_done
        path, body = request_of(rows[place]["prompt"], name, sampling, seed_of(sampling.seed, place))
        if chat_template_kwargs and "messages" in body:
            body["chat_template_kwargs"] = dict(chat_template_kwargs)
        async with gate:
            found = answered(await _asked(link, url, path, body), url)
        num_done += 1
        if report is not None:
            report(num_done, len(rows))
        return found

    try:
        name = model or first_model(await _asked(link, url, "/v1/models", None), url)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(place, name)) for place in range(len(rows))]
    except ExceptionGroup as errors:  # the first request that failed has ended the others
        raise errors.exceptions[0] from None
    finally:
        await link.close()
    return name, [task.result() for task in tasks]


async def _asked(link: Link, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
    """The parsed reply to one request, asked again with growing waits where that may help."""
    data = None if body is None else orjson.dumps(body)
    wait_s, reason = FIRST_WAIT_S, ""
    for attempt in range(ATTEMPTS):
        try:
            return answer(await link.exchange(url, path, data))
        except AskAgain as error:
            reason = str(error)
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(wait_s if error.wait_s is None else error.wait_s)
                wait_s *= 2
        except (Refused, BadReply) as error:
            raise DataError(f"the server does not take the evaluation: {error}") from error
    raise DataError(f"the server did not answer in {ATTEMPTS} attempts: {reason}")


def seed_of(seed: int, place: int) -> int:
    """The seed of one response; no two of an evaluation, or of evaluations with other seeds, are related."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0] >> 1)


def request_of(prompt: Any, model: str, sampling: Sampling, seed: int) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for one response; every setting is sent, for a server has defaults of its own."""
    drawn = {
        "model": model,
        "n": 1,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_completion_length,
    }
    if isinstance(prompt, str):
        return "/v1/completions", {**drawn, "prompt": prompt}
    return "/v1/chat/completions", {**drawn, "messages": prompt}


def answered(reply: Any, url: str) -> Answered:
    """The response in a reply.

    Raises:
      DataError: the reply is none of a completion.
    """
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Answered(text or "", int(reply["usage"]["completion_tokens"]), choice["finish_reason"] == "length")
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"{url} answers, and not as a vLLM server does: {error!r} is missing in its reply") from error


def first_model(reply: Any, url: str) -> str:
    """The first model of a server.

    Raises:
      DataError: it names none.
    """
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"{url} names no model; give --served-model") from error
