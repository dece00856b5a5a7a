"""Rollouts as JSON Lines: one response a line, everything that was measured about it, readable without a model.

    {"prompt_id": "p1", "response_id": "p1/0", "token_ids": [5, 9, 2], "token_mask": [1, 1, 1], "reward": 1.0, ...}

Only `prompt_id` and `token_ids` are required. Group statistics are taken over one generation batch: the whole file, or
the lines of one `step` where a training has written its steps one after the other. What a missing value means:

  reward null                    an unscored response, which is never counted as 0
  scores.X null or absent        the scorer failed on that response, or never saw it; in every line: not measured
  null within scores.X.logprobs  no score for that token
  demonstration null or absent   that prompt has no text; in every line: not measured
  kl absent                      likewise in a line whose scores.teacher is; there is no divergence from nothing
  any other key absent           not measured, and then absent in every line with a token in it

`record_lines` and `write_records` make such a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from hybrid.errors import DataError
from hybrid.record_format import RecordLine, Row, ScoreLine, parsed_lines
from hybrid.record_writer import Texts, record_lines, write_records
from hybrid.types import Demonstration, RolloutBatch, View

__all__ = ["Records", "Texts", "read_records", "record_lines", "write_records"]


@dataclass(frozen=True, kw_only=True)
class Records:
    """A file of rollouts, in the order of its lines.

    Attributes:
      batch: everything a method may read, in float64; its step is that of the lines, or the one that was asked for.
      prompt_ids, response_ids: names of each response.
      token_ids: the response tokens, without padding.
      current_logprob_BT: the student's log-probs at the update; those of the rollout where a line has none, and None
        where there are neither.
      demonstration_logprob_BU: the student's log-probs of the demonstration, where they were recorded.
      tokens: text of each token; None for a line without.
      prompts, completions: texts; None for a line without.
      rewards: named rewards of each response.
      partial: measurements that only some lines have -> the message for a method that reads them; such a measurement
        counts as not made.
    """

    batch: RolloutBatch
    prompt_ids: tuple[str, ...]
    response_ids: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    current_logprob_BT: Float[Tensor, "B T"] | None = None
    demonstration_logprob_BU: Float[Tensor, "B U"] | None = None
    tokens: tuple[tuple[str, ...] | None, ...] = ()
    prompts: tuple[str | None, ...] = ()
    completions: tuple[str | None, ...] = ()
    rewards: tuple[Mapping[str, float | None], ...] = field(default=())
    partial: Mapping[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each response."""
        return tuple(len(ids) for ids in self.token_ids)


def read_records(path: str | Path, *, step: int | None = None) -> Records:
    """Reads one generation batch of a record file.

    Args:
      path: the file.
      step: which step of a file whose lines have one; None is the first. Any, where the lines have none.

    Raises:
      DataError: the file is missing, empty or malformed; the message names line, response and key.
    """
    path = Path(path)
    rows = list(parsed_lines(path))
    if not rows:
        raise DataError(f"{path} holds no response; a record file has one JSON object a line")
    rows, step = _of_step(rows, step, path)
    lines = [row.line for row in rows]
    width = max(len(line.token_ids) for line in lines)
    prompt_ids = tuple(str(line.prompt_id) for line in lines)
    groups = {prompt_id: number for number, prompt_id in enumerate(dict.fromkeys(prompt_ids))}
    partial: dict[str, str] = {}
    student_BT = _per_token(rows, "student_logprobs", lambda line: line.student_logprobs, width, partial)
    current_BT = _per_token(
        rows, "current_logprobs", lambda line: line.current_logprobs or line.student_logprobs, width, partial
    )
    demonstration, demonstration_logprob_BU = _demonstration(rows, partial)
    mask_BT = _padded([line.token_mask or [1] * len(line.token_ids) for line in lines], width, 0).bool()
    return Records(
        batch=RolloutBatch(
            group_B=torch.tensor([groups[prompt_id] for prompt_id in prompt_ids]),
            mask_BT=mask_BT,
            reward_B=_per_row(rows, "reward", lambda line: line.reward, partial, optional=True),
            truncated_B=_flags(rows, partial),
            student_logprob_BT=student_BT,
            entropy_BT=_per_token(rows, "entropies", lambda line: line.entropies, width, partial),
            reverse_kl_BT=_per_token(rows, "kl", lambda line: line.kl, width, partial),
            teacher_accuracy_B=_per_row(rows, "teacher_accuracy", lambda line: line.teacher_accuracy, partial),
            views=_views(rows, width, mask_BT, student_BT, partial),
            demonstration=demonstration,
            step=step or 0,
            max_length=width,
            dtype=torch.float64,
        ),
        prompt_ids=prompt_ids,
        response_ids=tuple(row.response_id for row in rows),
        token_ids=tuple(tuple(line.token_ids) for line in lines),
        current_logprob_BT=current_BT,
        demonstration_logprob_BU=demonstration_logprob_BU,
        tokens=tuple(None if line.tokens is None else tuple(line.tokens) for line in lines),
        prompts=tuple(line.prompt for line in lines),
        completions=tuple(line.completion for line in lines),
        rewards=tuple(line.rewards or {} for line in lines),
        partial=partial,
    )


def _of_step(rows: Sequence[Row], step: int | None, path: Path) -> tuple[Sequence[Row], int | None]:
    """The lines of one step, and which it is; every line where none has a step."""
    unmarked = [row for row in rows if row.line.step is None]
    if len(unmarked) == len(rows):
        return rows, step
    if unmarked:
        raise DataError(f"{unmarked[0].where}: step is missing, and other lines have it; write it in every line")
    steps = sorted({row.line.step for row in rows if row.line.step is not None})
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise DataError(f"{path} has no line of step {chosen}; choose one of {steps[0]} to {steps[-1]} with --step")
    return [row for row in rows if row.line.step == chosen], chosen


def _padded(lists: Sequence[Sequence[float]], width: int, fill: float) -> Float[Tensor, "B T"]:
    """Lists of numbers as one tensor, filled up on the right."""
    rows = [[*values, *[fill] * (width - len(values))] for values in lists]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(lists), width)


def _per_token(
    rows: Sequence[Row],
    key: str,
    values: Callable[[RecordLine], Sequence[float] | None],
    width: int,
    partial: dict[str, str],
) -> Float[Tensor, "B T"] | None:
    """A measurement with one number per token; None where no line with a token has it."""
    lists = [values(row.line) for row in rows]
    if all(values(row.line) is None for row in [row for row in rows if row.line.token_ids] or rows):
        return None
    missing = [row for row, found in zip(rows, lists, strict=True) if found is None and row.line.token_ids]
    if key == "kl" and any(_teacher_scored(row) for row in rows):
        missing = [row for row in missing if _teacher_scored(row)]
    if _is_partial(missing, key, "leave it out of every line where it was not measured", partial):
        return None
    return _padded([found or [] for found in lists], width, 0)


def _teacher_scored(row: Row) -> bool:
    """Whether the teacher gave this response anything; where it failed there is no divergence from it."""
    score = (row.line.scores or {}).get("teacher")
    return score is not None and (score.top_ids is not None or any(x is not None for x in score.logprobs or ()))


def _per_row(
    rows: Sequence[Row],
    key: str,
    value: Callable[[RecordLine], float | None],
    partial: dict[str, str],
    *,
    optional: bool = False,
) -> Float[Tensor, " B"] | None:
    """A measurement with one number per response; with `optional`, a null is NaN and only an absent key is missing."""
    present = [key in row.line.model_fields_set and (optional or value(row.line) is not None) for row in rows]
    if not any(present):
        return None
    missing = [row for row, found in zip(rows, present, strict=True) if not found]
    advice = "write null for an unscored response" if optional else "measure it for every prompt"
    if _is_partial(missing, key, advice, partial):
        return None
    found = [value(row.line) for row in rows]
    return torch.tensor([torch.nan if number is None else number for number in found], dtype=torch.float64)


def _flags(rows: Sequence[Row], partial: dict[str, str]) -> Tensor | None:
    """Which responses hit the length limit; None where no line says."""
    number_B = _per_row(rows, "truncated", lambda line: line.truncated, partial)
    return None if number_B is None else number_B > 0


def _is_partial(missing: Sequence[Row], key: str, advice: str, partial: dict[str, str]) -> bool:
    """Whether some lines lack a measurement that others have; notes what a method that reads it is told."""
    if missing:
        partial[key] = f"{missing[0].where}: {key} is missing, and other lines have it; {advice}"
    return bool(missing)


def _views(
    rows: Sequence[Row],
    width: int,
    mask_BT: Tensor,
    student_BT: Float[Tensor, "B T"] | None,
    partial: dict[str, str],
) -> dict[str, View]:
    """Every scorer that some line has, in the order of their names."""
    names = sorted({name for row in rows for name, score in (row.line.scores or {}).items() if score})
    return {name: _view(rows, name, width, mask_BT, student_BT, partial) for name in names}


def _view(
    rows: Sequence[Row],
    name: str,
    width: int,
    mask_BT: Tensor,
    student_BT: Float[Tensor, "B T"] | None,
    partial: dict[str, str],
) -> View:
    scores = [(row.line.scores or {}).get(name) for row in rows]
    sampled = any(score and score.logprobs is not None for score in scores)
    lists: list[list[float]] = []
    for row, score in zip(rows, scores, strict=True):
        # Without any sampled log-prob in the file, a support alone makes a token known; NaN then says what is missing.
        known = score is not None and (score.logprobs is not None or not sampled)
        found = score.logprobs if score and score.logprobs is not None else [torch.nan] * len(row.line.token_ids)
        lists.append([torch.inf if value is None or not known else value for value in found])
    logprob_BT = _padded(lists, width, torch.inf)
    valid_BT = (logprob_BT < torch.inf) | logprob_BT.isnan()
    logprob_BT = logprob_BT.masked_fill(~valid_BT, 0)
    if name == "student":
        valid_BT = mask_BT
        logprob_BT = student_BT if student_BT is not None and not sampled else logprob_BT
    ids, logprobs = _support(rows, name, scores, width, partial)
    return View(logprob_BT=logprob_BT, valid_BT=valid_BT & mask_BT, top_ids_BTK=ids, top_logprob_BTK=logprobs)


def _support(
    rows: Sequence[Row], name: str, scores: Sequence[ScoreLine | None], width: int, partial: dict[str, str]
) -> tuple[Tensor | None, Tensor | None]:
    """Ids and log-probs of a scorer's top-k support, padded to the widest position; None where no line has one."""
    tops = [
        (score.top_ids or [], score.top_logprobs or []) if score and score.top_ids is not None else None
        for score in scores
    ]
    if not any(tops):
        return None, None
    must = [score is not None or name == "student" for score in scores]
    lacking = [row for row, top, m in zip(rows, tops, must, strict=True) if top is None and m and row.line.token_ids]
    advice = "leave it out of every line where it was not measured"
    if _is_partial(lacking, f"scores.{name}.top", advice, partial):
        return None, None
    num_top = max((len(ids) for top in tops if top for ids in top[0]), default=0)
    ids_BTK = torch.full((len(rows), width, num_top), -1, dtype=torch.long)
    logprob_BTK = torch.full((len(rows), width, num_top), -torch.inf, dtype=torch.float64)
    for row, top in enumerate(tops):
        for place, (ids, logprobs) in enumerate(zip(*top, strict=True) if top else ()):
            ids_BTK[row, place, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            logprob_BTK[row, place, : len(ids)] = torch.tensor(logprobs, dtype=torch.float64)
    return ids_BTK, logprob_BTK


def _demonstration(
    rows: Sequence[Row], partial: dict[str, str]
) -> tuple[Demonstration | None, Float[Tensor, "B U"] | None]:
    """The texts to imitate and the student's log-probs of them; None where no line has any."""
    texts = [row.line.demonstration for row in rows]
    if not any(texts):
        return None, None
    ids = [text.token_ids if text else [] for text in texts]
    width = max(1, *(len(row) for row in ids)) if len(ids) > 1 else max(1, len(ids[0]))
    demonstration = Demonstration(
        ids_BU=_padded(ids, width, 0).long(), mask_BU=_padded([[1] * len(row) for row in ids], width, 0).bool()
    )
    scored = [row for row, text in zip(rows, texts, strict=True) if text and text.token_ids and text.logprobs is None]
    if len(scored) == sum(bool(row) for row in ids):
        return demonstration, None
    if _is_partial(scored, "demonstration.logprobs", "record it for every text", partial):
        return demonstration, None
    return demonstration, _padded([text.logprobs or [] if text else [] for text in texts], width, 0)
