"""vLLM's wire: the bodies that ask for scores, and what their replies say. Pure functions, no network.

Three ways to ask, measured on vLLM 0.32 with 16 sequences of 200 tokens (`benchmarks/README.md` has the table):

- *echo*: `/v1/completions`, streamed, `echo` with `max_tokens` 0. Each sequence comes back as an event of its own with
  flat arrays: half the bytes of `prompt_logprobs` at k >= 20 and about a quarter of the decoding time.
- *plain*: `/v1/completions` with `prompt_logprobs`, an object of objects per position; for servers without the echo,
  and for those that compress, which leave streams alone: compressed, this one is the smaller.
- *candidates*: `/inference/v1/generate` with the student's ids; base64 .npy of the completion alone. It needs vLLM's V2
  model runner, so a GPU.

vLLM scores position t of a sequence under the tokens before it, hence the first entry of every reply is null.

Shape letters: T completion tokens of one row, K support, M entries of a position in a reply, N entries of a row.
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float64, Int64

FLOOR = -9999.0  # what vLLM writes in place of -inf, which JSON cannot carry
POSITIVE = 1e-3  # a log-prob above it is none, e.g. a raw logit; rounding stays far below
_TOKEN_KEY = "token_id:"  # vLLM's prefix of a key under return_tokens_as_token_ids
_VALUES = re.compile(rb'"token_logprobs":\s*(\[[^\]]*\])')
_PROMPT = re.compile(rb'"prompt_token_ids":\s*(\[[^\]]*\])')
_TOP = re.compile(rb'"top_logprobs":\s*\[null,\{')
_ERROR = re.compile(rb'\s*\{\s*"error"')
_NO_KEYS = bytes.maketrans(
    b":", b","
)  # with all letters of "token_id" but e deleted: {"token_id:5":-1e-05} -> e,5,-1e-05
_INDEX = re.compile(rb'"choices":\s*\[\{"index":\s*(\d+)')


class BadReply(ValueError):
    """A reply that cannot be what was asked for; asking again may help."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One sequence on its way to a server.

    Attributes:
      prompt_ids: the teacher's prompt; at least one id.
      completion_ids: what is scored; at least one id.
      candidate_ids_TK: the student's ids; -1 is padding. None where the teacher's own support is meant.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    candidate_ids_TK: Int64[np.ndarray, "T K"] | None = None

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The whole sequence."""
        return self.prompt_ids + self.completion_ids


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """What a server said about one completion.

    Attributes:
      logprob_T: log-probs of the sampled tokens in nats; nan where the server gave none that can be used.
      top_ids_TK: the support, -1 where a position has fewer ids.
      top_logprob_TK: its log-probs in nats, -inf where the id is -1.
      flaws: what was wrong with how many values: "null", "nan", "floored" (vLLM's -9999) or "positive".
    """

    logprob_T: Float64[np.ndarray, " T"]
    top_ids_TK: Int64[np.ndarray, "T K"] | None = None
    top_logprob_TK: Float64[np.ndarray, "T K"] | None = None
    flaws: Mapping[str, int] = field(default_factory=dict)


def echo_body(model: str, asks: Sequence[Ask], top_k: int) -> bytes:
    """Body of the streamed echo; `top_k` 0 asks for the sampled tokens alone."""
    body = {"max_tokens": 0, "echo": True, "stream": True, "return_token_ids": True, "logprobs": top_k}
    # ids in place of token texts, which two ids can share; dearer on the wire, so only where keys are read
    body["return_tokens_as_token_ids"] = top_k > 0
    return orjson.dumps({"model": model, "prompt": [ask.ids for ask in asks], **body})


def plain_body(model: str, asks: Sequence[Ask], top_k: int) -> bytes:
    """Body of `prompt_logprobs`; `top_k` 0 asks for the sampled tokens alone."""
    body = {"max_tokens": 1, "prompt_logprobs": top_k, "temperature": 1.0}
    return orjson.dumps({"model": model, "prompt": [ask.ids for ask in asks], **body})


def candidates_body(model: str, ask: Ask) -> bytes:
    """Body that asks for the sampled token and, behind it, the candidates of every completion position."""
    ids_TM = np.array(ask.completion_ids, dtype=np.int64)[:, None]
    if ask.candidate_ids_TK is not None:
        ids_TM = np.concatenate([ids_TM, ask.candidate_ids_TK], axis=1)
    params = {
        "max_tokens": 1,
        "detokenize": False,
        "prompt_logprob_token_ids": np.ascontiguousarray(ids_TM),
        "prompt_logprob_start": len(ask.prompt_ids) - 1,  # row i of the reply is position start + i + 1
    }
    body = {"model": model, "token_ids": ask.ids, "sampling_params": params}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def parsed(raw: bytes) -> Any:
    """The JSON value of `raw`; NaN and Infinity, which Python servers write, are read as numbers.

    Raises:
      BadReply: it is no JSON.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw)
        except ValueError as error:
            raise BadReply(f"the reply is no JSON ({error}): {raw[:120]!r}") from None


def events(stream: bytes) -> Iterator[bytes]:
    """The data of the server-sent events in `stream`, one line each; a line that was cut off is left out."""
    start = 0
    while (end := stream.find(b"\n", start)) >= 0:  # one character is found ten times as fast as two
        if stream.startswith((b"data: {", b"data:{"), start):
            yield stream[start + 5 : end]
        start = end + 1


def event_error(event: bytes) -> tuple[int, str] | None:
    """Status and message of an event that reports an error in a stream that began well; None for any other."""
    if _ERROR.match(event) is None:
        return None
    error = parsed(event)["error"]
    return int(error.get("code") or 500), str(error.get("message", error))


def event_index(event: bytes) -> int:
    """Which of the prompts an echo event belongs to; events come in the order in which the server finishes.

    Raises:
      BadReply: the event has no index.
    """
    match = _INDEX.search(event)
    if match:
        return int(match[1])
    try:
        return int(parsed(event)["choices"][0]["index"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadReply(f"the event names no choice: {event[:120]!r}") from None


def read_echo(event: bytes, ask: Ask, top_k: int) -> RowScores:
    """Reads one echo event.

    Args:
      event: the data of the event.
      ask: the sequence that it answers.
      top_k: size of the support that was asked for.

    Raises:
      BadReply: it scores other ids, another number of them, or fewer than `top_k`.
    """
    values, prompt = _VALUES.search(event), _PROMPT.search(event, max(0, event.rfind(b'"prompt_token_ids"')))
    if not values or not prompt:
        raise BadReply(f"the event has no token_logprobs with prompt_token_ids: {event[:120]!r}")
    if prompt[1] != orjson.dumps(ask.ids):
        _check_ids(parsed(prompt[1]), ask)
    entries = parsed(values[1])
    _check_count(len(entries), ask)
    logprob_T, flaws = _usable(entries[len(ask.prompt_ids) :])
    if not top_k:
        return RowScores(logprob_T=logprob_T, flaws=flaws)
    support = _flat_entries(event, ask) or _nested_entries(event, ask)
    return _with_support(logprob_T, flaws, *support, top_k)


def _flat_entries(event: bytes, ask: Ask) -> tuple[Any, Any, list[int]] | None:
    """Ids, values and their number per completion position, read as one list of numbers; None where it is not one.

    That takes half the time of reading an object per position.
    """
    top = _TOP.search(event)
    inside = event[top.end() : event.find(b"]", top.end()) - 1] if top else b""
    positions = inside.split(b"},{")[len(ask.prompt_ids) - 1 :]
    if len(positions) != len(ask.completion_ids):
        return None
    counts = [position.count(b'"token_id:') for position in positions]
    numbers = b",".join(positions).translate(_NO_KEYS, b'"{}tokn_id').replace(b"e,", b"")
    try:
        flat = orjson.loads(b"[%b]" % numbers)
        pairs = np.fromiter(flat, np.float64, 2 * sum(counts))
    except (orjson.JSONDecodeError, TypeError, ValueError):
        return None  # a null, a nan or a text among them
    return (pairs[::2].astype(np.int64), pairs[1::2], counts) if len(flat) == len(pairs) else None


def _nested_entries(event: bytes, ask: Ask) -> tuple[Any, Any, list[int]]:
    """As `_flat_entries`, for a reply with anything in it that is no number."""
    positions = parsed(event)["choices"][0]["logprobs"]["top_logprobs"]
    _check_count(len(positions), ask)
    positions = positions[len(ask.prompt_ids) :]
    if not all(positions):
        raise BadReply("a completion position has no top log-probs")
    ids_N = _ids([*chain.from_iterable(positions)], _TOKEN_KEY)
    values_N = np.array([*chain.from_iterable(map(dict.values, positions))], dtype=np.float64)
    return ids_N, values_N, [*map(len, positions)]


def read_plain(choice: Mapping[str, Any], ask: Ask, top_k: int) -> RowScores:
    """Reads one choice of a reply with `prompt_logprobs`: the entry of the real token, not the first nor the best.

    Args:
      choice: the parsed choice.
      ask: the sequence that it answers.
      top_k: size of the support that was asked for.

    Raises:
      BadReply: it scores another number of ids, has no entry for a sampled id, or fewer than `top_k`.
    """
    positions = choice.get("prompt_logprobs")
    if not isinstance(positions, list):
        raise BadReply("the reply has no prompt_logprobs")
    _check_count(len(positions), ask)
    positions = positions[len(ask.prompt_ids) :]
    if not all(positions):
        raise BadReply("a completion position has no log-probs")
    keys = [*map(str, ask.completion_ids)]
    try:
        sampled = [position[key]["logprob"] for position, key in zip(positions, keys, strict=True)]
    except KeyError as key:
        raise BadReply(
            f"a position has no entry for the sampled id {key}; its keys may be texts or other ids"
        ) from None
    logprob_T, flaws = _usable(sampled)
    if not top_k:
        return RowScores(logprob_T=logprob_T, flaws=flaws)
    ids_N = _ids([*chain.from_iterable(positions)], "")
    entries = chain.from_iterable(map(dict.values, positions))
    values_N = np.array([*map(itemgetter("logprob"), entries)], dtype=np.float64)
    return _with_support(logprob_T, flaws, ids_N, values_N, [*map(len, positions)], top_k)


def read_candidates(reply: Mapping[str, Any], ask: Ask) -> RowScores:
    """Reads a reply with `prompt_token_id_logprobs`.

    Args:
      reply: the parsed body.
      ask: the sequence that it answers.

    Raises:
      BadReply: there is no array, or it is not one row per completion token with a column per id that was asked for.
    """
    encoded = reply.get("prompt_token_id_logprobs")
    if not isinstance(encoded, str):
        raise BadReply("the reply has no prompt_token_id_logprobs")
    try:
        values_TM = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.float64)
    except ValueError as error:
        raise BadReply(f"prompt_token_id_logprobs is no .npy array: {error}") from None
    num_support = 0 if ask.candidate_ids_TK is None else ask.candidate_ids_TK.shape[1]
    expected = (len(ask.completion_ids), 1 + num_support)
    if values_TM.shape != expected:
        raise BadReply(f"prompt_token_id_logprobs has shape {values_TM.shape}; asked for {expected}")
    values_TM = np.where(np.isneginf(values_TM), FLOOR, values_TM)  # .npy carries -inf, JSON's replies do not
    logprob_T, flaws = _usable(values_TM[:, 0])
    if ask.candidate_ids_TK is None:
        return RowScores(logprob_T=logprob_T, flaws=flaws)
    ids_TK = ask.candidate_ids_TK
    top_TK = np.where((ids_TK < 0) | (values_TM[:, 1:] <= FLOOR), -np.inf, values_TM[:, 1:])
    return _without_broken(logprob_T, flaws, ids_TK, top_TK, values_TM[:, 1:])


def _check_ids(ids: Sequence[int], ask: Ask) -> None:
    if tuple(ids) != ask.ids:
        raise BadReply(f"the server scored {len(ids)} other ids than the {len(ask.ids)} that were sent")


def _check_count(count: int, ask: Ask) -> None:
    # never aligned from the end: a short reply does not say which of its scores are missing
    if count != len(ask.ids):
        raise BadReply(f"the server returned {count} scores for {len(ask.ids)} tokens")


def _usable(values: Any) -> tuple[Float64[np.ndarray, " T"], dict[str, int]]:
    """Values with nan where there is none to use, and how many there are of each kind of those."""
    try:
        logprob_T = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BadReply("a log-prob of the reply is no number") from None
    if logprob_T.min(initial=0.0) > FLOOR and logprob_T.max(initial=0.0) <= POSITIVE:  # false where there is a nan
        return logprob_T, {}
    is_nan_T = np.isnan(logprob_T)
    num_null = values.count(None) if isinstance(values, list) else 0
    counts = {
        "null": num_null,
        "nan": int(is_nan_T.sum()) - num_null,
        "floored": int((logprob_T <= FLOOR).sum()),
        "positive": int((logprob_T > POSITIVE).sum()),
    }
    bad_T = is_nan_T | (logprob_T <= FLOOR) | (logprob_T > POSITIVE)
    return np.where(bad_T, np.nan, logprob_T), {kind: count for kind, count in counts.items() if count}


def _ids(keys: Sequence[str], prefix: str) -> Int64[np.ndarray, " N"]:
    joined = ",".join(keys)
    if joined.count(prefix) < len(keys):  # an empty prefix is counted once a character and more
        raise BadReply(f"a key of the reply is no id but a text, e.g. {keys[0]!r}")
    try:
        ids_N = np.array(orjson.loads(f"[{joined.replace(prefix, '')}]"), dtype=np.int64)
    except (orjson.JSONDecodeError, TypeError, ValueError):
        raise BadReply(f"a key of the reply is no id but a text, e.g. {keys[0]!r}") from None
    if len(ids_N) != len(keys):
        raise BadReply("a key of the reply is no id but a text")
    return ids_N


def _with_support(
    logprob_T: Float64[np.ndarray, " T"],
    flaws: Mapping[str, int],
    ids_N: Int64[np.ndarray, " N"],
    values_N: Float64[np.ndarray, " N"],
    counts: Sequence[int],
    top_k: int,
) -> RowScores:
    """Adds the `top_k` best ids of every position; a position's entries stand together, in any order.

    The sampled id is among the entries too, beyond the k best where it is none of them; sorting drops it there.
    """
    if min(counts) < top_k:
        raise BadReply(f"the server returned {min(counts)} ids at a position where {top_k} were asked for")
    count_T = np.array(counts)
    is_entry_TM = np.arange(max(counts)) < count_T[:, None]
    value_TM = np.full(is_entry_TM.shape, -np.inf)
    id_TM = np.full(is_entry_TM.shape, -1)
    value_TM[is_entry_TM], id_TM[is_entry_TM] = np.where(values_N <= FLOOR, -np.inf, values_N), ids_N
    # vLLM lists the sampled id first and then the best in their order, so most positions need no sorting
    first_T = count_T > top_k
    value_TK, id_TK = (
        np.where(first_T[:, None], one_TM[:, -top_k:], one_TM[:, :top_k]) for one_TM in (value_TM, id_TM)
    )
    is_sorted_T = (value_TK[:, 1:] <= value_TK[:, :-1]).all(axis=1) & (~first_T | (value_TM[:, 0] <= value_TK[:, -1]))
    unsorted = np.flatnonzero(~is_sorted_T | (count_T > top_k + 1))
    if len(unsorted):
        order = np.argsort(-value_TM[unsorted], axis=1, kind="stable")[:, :top_k]
        value_TK[unsorted] = np.take_along_axis(value_TM[unsorted], order, axis=1)
        id_TK[unsorted] = np.take_along_axis(id_TM[unsorted], order, axis=1)
    return _without_broken(logprob_T, flaws, id_TK, value_TK, value_TM)


def _without_broken(
    logprob_T: Float64[np.ndarray, " T"],
    flaws: Mapping[str, int],
    id_TK: Int64[np.ndarray, "T K"],
    value_TK: Float64[np.ndarray, "T K"],
    value_TM: Float64[np.ndarray, "T M"],
) -> RowScores:
    # a position whose support holds a nan, or more than a probability, has no distribution to train on
    broken_T = np.any(np.isnan(value_TM) | (value_TM > POSITIVE), axis=1)
    id_TK = np.where(broken_T[:, None] | np.isneginf(value_TK), -1, id_TK)
    num_new = int((broken_T & ~np.isnan(logprob_T)).sum())
    return RowScores(
        logprob_T=np.where(broken_T, np.nan, logprob_T),
        top_ids_TK=id_TK,
        top_logprob_TK=np.where(id_TK < 0, -np.inf, value_TK),
        flaws={**flaws, "nan": flaws.get("nan", 0) + num_new} if num_new else flaws,
    )
