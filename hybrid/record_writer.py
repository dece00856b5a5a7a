"""Writes what a run measured, as the lines that `hybrid.records` reads."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from jaxtyping import Float
from torch import Tensor

from hybrid.errors import check
from hybrid.types import Demonstration, RolloutBatch, View


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What a person reads beside the numbers; None is: not recorded.

    Attributes:
      prompts, completions: a text per response.
      tokens: the text of each token of each response.
      rewards: named rewards, one number per response each; None is unscored.
    """

    prompts: Sequence[str] | None = None
    completions: Sequence[str] | None = None
    tokens: Sequence[Sequence[str]] | None = None
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


NO_TEXTS = Texts()
"""Numbers alone."""


def record_lines(
    batch: RolloutBatch,
    *,
    prompt_ids: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    response_ids: Sequence[str] | None = None,
    texts: Texts = NO_TEXTS,
    current_logprob_BT: Float[Tensor, "B T"] | None = None,
    demonstration_logprob_BU: Float[Tensor, "B U"] | None = None,
) -> Iterator[str]:
    """The lines of one generation batch, in its order, without line ends.

    Args:
      batch: everything that was measured; what is None is left out.
      prompt_ids: name of each row's prompt; rows of one prompt share it.
      token_ids: response tokens of each row, without padding.
      response_ids: names of the responses; without, the reader numbers them within their prompt.
      texts: what a person reads.
      current_logprob_BT: the student's log-probs at the update, where they differ from the rollout's.
      demonstration_logprob_BU: the student's log-probs of the demonstrations at the update.

    Raises:
      HybridError: a number is not finite where a token counts; JSON has no such number.
    """
    columns = _columns(batch, current_logprob_BT)
    for row, ids in enumerate(token_ids):
        line: dict[str, Any] = {"prompt_id": prompt_ids[row]}
        if response_ids is not None:
            line["response_id"] = response_ids[row]
        line |= {"token_ids": list(ids), "token_mask": batch.mask_BT[row, : len(ids)].int().tolist()}
        line |= _row_measurements(batch, row)
        line |= {key: value_BT[row, : len(ids)].tolist() for key, value_BT in columns.items()}
        if batch.views:
            line["scores"] = {name: _score(view, name, row, len(ids)) for name, view in batch.views.items()}
        if batch.demonstration is not None:
            line["demonstration"] = _demonstration(batch.demonstration, row, demonstration_logprob_BU)
        yield orjson.dumps(line | _texts(texts, row)).decode()


def write_records(path: Path, lines: Iterable[str]) -> int:
    """Appends lines to a record file, making it and its folder where needed; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        return sum(file.write(line + "\n") > 0 for line in lines)


def _columns(batch: RolloutBatch, current_logprob_BT: Float[Tensor, "B T"] | None) -> dict[str, Float[Tensor, "B T"]]:
    """The measurements with one number per token, by their names in the record; 0 where the token has none."""
    teacher = batch.views.get("teacher")
    measured = {
        "student_logprobs": (batch.student_logprob_BT, batch.mask_BT),
        "current_logprobs": (current_logprob_BT, batch.mask_BT),
        "entropies": (batch.entropy_BT, batch.mask_BT),
        # A response whose teacher failed has no divergence from it.
        "kl": (batch.reverse_kl_BT, batch.mask_BT if teacher is None else batch.mask_BT & teacher.valid_BT),
    }
    out: dict[str, Float[Tensor, "B T"]] = {}
    for key, (value_BT, use_BT) in measured.items():
        if value_BT is not None:
            check(value_BT.isfinite() | ~use_BT, value_BT, f"{key} must be finite to be recorded")
            out[key] = value_BT.masked_fill(~use_BT, 0)
    return out


def _row_measurements(batch: RolloutBatch, row: int) -> dict[str, Any]:
    """The measurements with one value per response."""
    out: dict[str, Any] = {}
    if batch.reward_B is not None:
        out["reward"] = _number(float(batch.reward_B[row]))
    if batch.truncated_B is not None:
        out["truncated"] = bool(batch.truncated_B[row])
    if batch.teacher_accuracy_B is not None:
        out["teacher_accuracy"] = float(batch.teacher_accuracy_B[row])
    return out


def _number(value: float | None) -> float | None:
    """The value; None for NaN, which is an unscored response."""
    return None if value is None or math.isnan(value) else float(value)


def _score(view: View, name: str, row: int, length: int) -> dict[str, Any]:
    """One scorer's part of a line; a token without a score is null."""
    valid_T = view.valid_BT[row, :length].tolist()
    logprob_T = view.logprob_BT[row, :length]
    check(
        logprob_T.isfinite() | ~view.valid_BT[row, :length], logprob_T, f"scores.{name} must be finite to be recorded"
    )
    out: dict[str, Any] = {
        "logprobs": [value if known else None for value, known in zip(logprob_T.tolist(), valid_T, strict=True)]
    }
    if view.top_ids_BTK is not None and view.top_logprob_BTK is not None:
        ids_TK, logprobs_TK = view.top_ids_BTK[row, :length].tolist(), view.top_logprob_BTK[row, :length].tolist()
        pairs_TK = [
            [(i, x) for i, x in zip(ids_K, logprobs_K, strict=True) if i >= 0 and x > -math.inf]
            for ids_K, logprobs_K in zip(ids_TK, logprobs_TK, strict=True)
        ]
        out["top_ids"] = [[i for i, _ in pairs_K] for pairs_K in pairs_TK]
        out["top_logprobs"] = [[x for _, x in pairs_K] for pairs_K in pairs_TK]
    return out


def _demonstration(
    text: Demonstration, row: int, logprob_BU: Float[Tensor, "B U"] | None
) -> dict[str, list[int] | list[float]]:
    """The text of a row; empty where there is none."""
    mask_U = text.mask_BU[row]
    out: dict[str, list[int] | list[float]] = {"token_ids": text.ids_BU[row][mask_U].tolist()}
    if logprob_BU is not None:
        out["logprobs"] = logprob_BU[row, : len(mask_U)][mask_U].tolist()
    return out


def _clean(text: str) -> str:
    """The text with what UTF-8 cannot hold (lone surrogates) replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _texts(texts: Texts, row: int) -> dict[str, Any]:
    """What a person reads of a row."""
    out: dict[str, Any] = {}
    if texts.rewards:
        out["rewards"] = {name: _number(values[row]) for name, values in texts.rewards.items()}
    if texts.prompts is not None:
        out["prompt"] = _clean(texts.prompts[row])
    if texts.completions is not None:
        out["completion"] = _clean(texts.completions[row])
    if texts.tokens is not None:
        out["tokens"] = [_clean(token) for token in texts.tokens[row]]
    return out
