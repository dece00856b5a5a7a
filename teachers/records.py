"""Scores at rest: one JSON object for each sequence, the same in a recording, in a cache and in an export.

    {"teacher": "qwen", "prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -1.0]}

is a whole record. Beside these stand, where they are needed: `top_k`, or `candidates` (ids for each token), with
`top_ids` and `top_logprobs` (a list for each token); `images` (hashes of pixels); `temperature` (1 where it is not
said); `valid` (all True where it is not said); `dtype` (float32 where it is not said). Minus infinity is null.

Shape letters: T completion tokens of one row, K support; B as in `TeacherScores`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from PIL.Image import Image
from torch import Tensor

from teachers.errors import TeacherCannot, TeacherError
from teachers.protocol import Row, Want
from teachers.scores import TeacherScores

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TOP = ("top_ids", "top_logprobs")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What one row asks one teacher; the same question always has the same answer.

    Attributes:
      teacher: identity of the teacher, not only its name.
      prompt_ids: as the teacher sees them.
      completion_ids: to be scored.
      images: a hash for each picture.
      top_k: size of the teacher's own support.
      candidates: the student's support, for each token; None where it asks for none.
    """

    teacher: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    images: tuple[str, ...] = ()
    top_k: int = 0
    candidates: tuple[tuple[int, ...], ...] | None = None

    @property
    def sequence_key(self) -> str:
        """Names the sequence, whatever is asked about it."""
        return _hashed([self.teacher, self.prompt_ids, self.completion_ids, self.images])

    @property
    def key(self) -> str:
        """Names the question."""
        return _hashed([self.sequence_key, self.top_k, self.candidates])

    @property
    def want(self) -> str:
        """What is asked about the sequence, for a person."""
        if self.candidates is not None:
            return "candidates of the student"
        return f"top_k={self.top_k}"

    def to_json(self) -> dict[str, Any]:
        """The question's part of a record."""
        told: dict[str, Any] = {
            "teacher": self.teacher,
            "prompt_ids": self.prompt_ids,
            "completion_ids": self.completion_ids,
        }
        optional = {"images": self.images, "top_k": self.top_k}
        told |= {name: value for name, value in optional.items() if value}
        return told if self.candidates is None else told | {"candidates": self.candidates}


def questions(teacher: str, rows: Sequence[Row], want: Want) -> list[Question]:
    """One question for each row.

    Raises:
      TeacherCannot: the full distribution is wanted, or an image is not a picture of PIL.
    """
    if want.distribution:
        raise TeacherCannot(
            "hidden states and heads are not recorded; ask a recorded or cached teacher for sampled tokens, top_k or "
            "candidates, or use a local teacher"
        )
    supports = None if want.candidates_BTK is None else want.candidates_BTK.tolist()
    return [
        Question(
            teacher=teacher,
            prompt_ids=tuple(row.prompt_ids),
            completion_ids=tuple(row.completion_ids),
            images=tuple(_picture_hash(image) for image in row.images),
            top_k=want.top_k,
            candidates=None if supports is None else tuple(map(tuple, supports[i][: len(row.completion_ids)])),
        )
        for i, row in enumerate(rows)
    ]


def to_lines(asked: Sequence[Question], scores: TeacherScores) -> list[bytes | None]:
    """The records of a batch, without a line break; None for a row that failed.

    Raises:
      TeacherError: a score is not a number.
    """
    logprobs = _listed("logprob_BT", scores.logprob_BT)
    valid = scores.valid_BT.tolist()
    top_ids = None if scores.top_ids_BTK is None else scores.top_ids_BTK.tolist()
    top_logprobs = None if scores.top_logprob_BTK is None else _listed("top_logprob_BTK", scores.top_logprob_BTK)
    dtype = "float64" if scores.logprob_BT.dtype == torch.float64 else "float32"
    lines: list[bytes | None] = []
    for i, question in enumerate(asked):
        if i in scores.failures:
            lines.append(None)
            continue
        num = len(question.completion_ids)
        record = question.to_json() | {"logprobs": logprobs[i][:num]}
        if scores.temperature != 1.0:
            record["temperature"] = scores.temperature
        if not all(valid[i][:num]):
            record["valid"] = valid[i][:num]
        if dtype != "float32":
            record["dtype"] = dtype
        if top_ids is not None and top_logprobs is not None:
            record |= {"top_ids": top_ids[i][:num], "top_logprobs": top_logprobs[i][:num]}
        lines.append(orjson.dumps(record))  # orjson writes infinities as null
    return lines


def to_scores(
    records: Sequence[Mapping[str, Any] | None],
    rows: Sequence[Row],
    want: Want,
    failures: Mapping[int, str],
    stats: Mapping[str, float],
) -> TeacherScores:
    """Puts records together again, on the CPU.

    Args:
      records: in the order of the rows; None for a row in `failures`.
      rows: what was asked.
      want: what was asked for.
      failures: as in `TeacherScores`.
      stats: as in `TeacherScores`.

    Raises:
      TeacherError: the records hold at different temperatures.
    """
    there = [record for record in records if record is not None]
    temperatures = sorted({float(record.get("temperature", 1.0)) for record in there})
    if len(temperatures) > 1:
        raise TeacherError(f"the recorded scores of one batch hold at temperatures {temperatures}; record them at one")
    width = max((len(row.completion_ids) for row in rows), default=0)
    num_support = want.top_k if want.candidates_BTK is None else want.candidates_BTK.shape[2]
    has_support = want.top_k > 0 or want.candidates_BTK is not None
    dtype = DTYPES["float64" if any(record.get("dtype") == "float64" for record in there) else "float32"]
    shape = (len(records), width)
    logprob_BT, valid_BT = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    top_ids_BTK = torch.full((*shape, num_support), -1)
    top_logprob_BTK = torch.full((*shape, num_support), float("-inf"), dtype=dtype)
    for i, record in enumerate(records):
        if record is None or not record["completion_ids"]:
            continue
        num = len(record["completion_ids"])
        logprob_BT[i, :num] = _tensor(record["logprobs"], dtype)
        valid_BT[i, :num] = torch.tensor(record.get("valid", [True] * num))
        if has_support:
            num_own = len(record["top_ids"][0])
            top_ids_BTK[i, :num, :num_own] = torch.tensor(record["top_ids"])
            top_logprob_BTK[i, :num, :num_own] = torch.stack([_tensor(row, dtype) for row in record["top_logprobs"]])
    return TeacherScores(
        logprob_BT=logprob_BT,
        valid_BT=valid_BT,
        temperature=temperatures[0] if temperatures else 1.0,
        top_ids_BTK=top_ids_BTK if has_support else None,
        top_logprob_BTK=top_logprob_BTK if has_support else None,
        failures=failures,
        stats=stats,
    )


def read_record(line: bytes, default_teacher: str) -> tuple[Question, dict[str, Any]]:
    """Reads one record and holds its parts to one another.

    Raises:
      TeacherError: it is no record; the message says which part is wrong.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TeacherError(f"it is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TeacherError(f"it is a {type(record).__name__}, not an object")
    _check_parts(record)
    candidates = record.get("candidates")
    asked_for_own = 0 if candidates is not None else len(record["top_ids"][0]) if record.get("top_ids") else 0
    question = Question(
        teacher=str(record.get("teacher", default_teacher)),
        prompt_ids=tuple(record["prompt_ids"]),
        completion_ids=tuple(record["completion_ids"]),
        images=tuple(record.get("images", ())),
        top_k=int(record.get("top_k", asked_for_own)),
        candidates=None if candidates is None else tuple(map(tuple, candidates)),
    )
    return question, record


def _check_parts(record: Mapping[str, Any]) -> None:
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        if not isinstance(record.get(name), list):
            raise TeacherError(f"it needs {name!r}, a list")
    for name in ("prompt_ids", "completion_ids"):
        if not all(type(token) is int for token in record[name]):
            raise TeacherError(f"{name!r} must be whole numbers")
    num = len(record["completion_ids"])
    for name in ("logprobs", "valid", "top_ids", "top_logprobs", "candidates"):
        if name in record and len(record[name]) != num:
            raise TeacherError(f"it has {num} completion_ids and {len(record[name])} {name}; they must be as many")
    has_support = bool(record.get("top_k")) or "candidates" in record
    if len({name in record for name in _TOP}) > 1 or (has_support and "top_ids" not in record):
        raise TeacherError("top_ids and top_logprobs go together, and with top_k or candidates both are needed")
    if len({len(support) for name in _TOP for support in record.get(name, ())}) > 1:
        raise TeacherError("top_ids and top_logprobs must have the same length at each token; pad with -1 and null")
    if record.get("dtype", "float32") not in DTYPES:
        raise TeacherError(f"dtype must be one of {sorted(DTYPES)}; got {record['dtype']!r}")


def _listed(name: str, values: Tensor) -> list[Any]:
    if bool(values.isnan().any()):
        row = int(values.isnan().flatten(1).any(1).nonzero()[0])
        raise TeacherError(f"{name} of row {row} is not a number, so it is not recorded; look at the teacher's weights")
    return values.tolist()


def _tensor(values: Sequence[float | None], dtype: torch.dtype) -> Tensor:
    return torch.tensor([float("-inf") if value is None else value for value in values], dtype=dtype)


def _picture_hash(image: Any) -> str:
    if not isinstance(image, Image):
        raise TeacherCannot(f"an image is a {type(image).__name__}; only pictures of PIL are recorded by their pixels")
    return _hashed([image.mode, image.size, hashlib.sha256(image.tobytes()).hexdigest()])


def _hashed(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value)).hexdigest()
