"""One line of a record file: its keys, and what is wrong with one that does not fit."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from hybrid.errors import DataError

Numbers = list[float]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**53)]]
Share = Annotated[float, Field(ge=0, le=1)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ScoreLine(_Line):
    """One scorer's part of a line."""

    logprobs: list[float | None] | None = None
    top_ids: list[TokenIds] | None = None
    top_logprobs: list[Numbers] | None = None


class DemonstrationLine(_Line):
    """The text to imitate; an empty one says that the prompt has none."""

    token_ids: TokenIds
    logprobs: Numbers | None = None


class RecordLine(_Line):
    """One line of the file, as it stands there."""

    prompt_id: str | int
    response_id: str | int | None = None
    token_ids: TokenIds
    token_mask: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    reward: float | None = None
    rewards: dict[str, float | None] | None = None
    truncated: bool | None = None
    teacher_accuracy: Share | None = None
    student_logprobs: Numbers | None = None
    current_logprobs: Numbers | None = None
    entropies: Numbers | None = None
    kl: Numbers | None = None
    scores: dict[str, ScoreLine | None] | None = None
    demonstration: DemonstrationLine | None = None
    prompt: str | None = None
    completion: str | None = None
    tokens: list[str] | None = None
    # What a training wrote beside its rollouts, for reports; `hybrid explain` works it out anew.
    step: int | None = None
    advantages: Numbers | None = None
    kl_weights: Numbers | None = None
    kept: list[Annotated[int, Field(ge=0, le=1)]] | None = None


PER_TOKEN = (
    "token_mask",
    "student_logprobs",
    "current_logprobs",
    "entropies",
    "kl",
    "tokens",
    "advantages",
    "kl_weights",
    "kept",
)
"""Keys whose lists have one entry per token."""


class Row(NamedTuple):
    """A line and how messages call it."""

    where: str
    line: RecordLine
    response_id: str


def parsed_lines(path: Path) -> Iterator[Row]:
    """Each line of the file, checked by itself and against the names before it."""
    if not path.is_file():
        raise DataError(f"there is no record file {path}")
    seen: dict[tuple[int | None, str], int] = {}
    counts: dict[tuple[int | None, str], int] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        if not text.strip():
            continue
        line = _line(text, f"{path}, line {number}")
        prompt = (line.step, str(line.prompt_id))
        counts[prompt] = counts.get(prompt, -1) + 1
        response_id = f"{prompt[1]}/{counts[prompt]}" if line.response_id is None else str(line.response_id)
        where = f"{path}, line {number} (response {response_id})"
        if first := seen.get((line.step, response_id)):
            raise DataError(f"{where}: this response_id stands on line {first} already; give each its own")
        seen[line.step, response_id] = number
        _check_lengths(line, where)
        yield Row(where, line, response_id)


def _line(text: bytes, where: str) -> RecordLine:
    """One line of JSON as a record.

    Raises:
      DataError: names the line, the response where it can be told, the key and the nearest right key.
    """
    try:
        return RecordLine.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise DataError(f"{where}: not a line of JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from error
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _location(first["loc"]))[1:]
        given = first["input"]
    name = _name_of(text)
    where = f"{where} ({name})" if name else where
    if first["type"] == "extra_forbidden":
        near = get_close_matches(key.rsplit(".")[-1], _siblings(first["loc"]), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_siblings(first['loc']))}"
        raise DataError(f"{where}: unknown key {key}; {hint}")
    if first["type"] == "missing":
        raise DataError(f"{where}: {key} is missing")
    if first["type"] == "finite_number":
        raise DataError(f"{where}: {key} is not a finite number")
    raise DataError(f"{where}: {key or 'the line'}: {first['msg'][0].lower()}{first['msg'][1:]}; got {given!r:.80}")


def _location(loc: Sequence[str | int]) -> Sequence[str | int]:
    """A place in the line without the names that pydantic gives to the branches of a union."""
    return loc[:1] if loc[:1] in (("prompt_id",), ("response_id",)) else loc


def _siblings(loc: Sequence[str | int]) -> list[str]:
    """The keys that may stand where an unknown one was found."""
    if loc[0] == "scores":
        return list(ScoreLine.model_fields)
    return list(DemonstrationLine.model_fields if len(loc) > 1 else RecordLine.model_fields)


def _name_of(text: bytes) -> str:
    """Which response, or which prompt, a line that is JSON but no record is about; empty where it does not say."""
    value = from_json(text)
    keys = ("response_id", "prompt_id") if isinstance(value, dict) else ()
    named = [f"{key.removesuffix('_id')} {value[key]}" for key in keys if isinstance(value.get(key), str | int)]
    return named[0] if named else ""


def _check_lengths(line: RecordLine, where: str) -> None:
    """Refuses a list that does not have one entry per token."""
    lists: dict[str, Sequence[Any] | None] = {key: getattr(line, key) for key in PER_TOKEN}
    for name, score in (line.scores or {}).items():
        if score is None:
            continue
        lists |= {f"scores.{name}.{key}": getattr(score, key) for key in ScoreLine.model_fields}
        if (score.top_ids is None) != (score.top_logprobs is None):
            raise DataError(f"{where}: scores.{name} needs both top_ids and top_logprobs, or neither")
    for key, values in lists.items():
        if values is not None and len(values) != len(line.token_ids):
            raise DataError(f"{where}: {key} has {len(values)} entries for {len(line.token_ids)} token_ids")
    for name, score in (line.scores or {}).items():
        pairs = zip(score.top_ids or [], score.top_logprobs or [], strict=True) if score else ()
        for place, (ids, logprobs) in enumerate(pairs):
            if len(ids) != len(logprobs):
                key = f"scores.{name}.top_logprobs[{place}]"
                raise DataError(f"{where}: {key} has {len(logprobs)} entries for {len(ids)} top_ids")
    text = line.demonstration
    if text and text.logprobs is not None and len(text.logprobs) != len(text.token_ids):
        raise DataError(
            f"{where}: demonstration.logprobs has {len(text.logprobs)} entries for {len(text.token_ids)} token_ids"
        )
