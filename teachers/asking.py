"""What goes out for a batch of rows, and what is made of the answers: duplicates asked once, failures named.

Shape letters as in `TeacherScores`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch
from teachers.protocol import Row, Want
from teachers.scores import TeacherScores
from teachers.wire import Ask, RowScores


@dataclass(kw_only=True)
class Run:
    """One call of `score` on its way.

    Attributes:
      asks: the different sequences.
      top_k: size of the teacher's own support; 0 for none.
      by_candidates: whether scores are asked for id by id, by the candidates' route.
      scores: the answers so far, by place in `asks`.
      failures: why a place has none and will get none.
      is_dead: no replica is up and a request has used up its retries.
      stats: what it cost.
    """

    asks: Sequence[Ask]
    top_k: int
    by_candidates: bool
    scores: dict[int, RowScores] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    is_dead: bool = False
    stats: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, number: float = 1) -> None:
        """Adds to a figure of `TeacherScores.stats`."""
        self.stats[name] = self.stats.get(name, 0) + number


def check_rows(name: str, rows: Sequence[Row], want: Want, vocab_size: int | None) -> None:
    """Refuses what a served teacher cannot be asked, before anything is sent.

    Raises:
      TeacherCannot: whole distributions, or images.
      TeacherMismatch: an empty prompt, or an id at or over `vocab_size`.
      TeacherError: two supports at once, or candidates of another shape than the rows.
    """
    if want.distribution:
        raise TeacherCannot(
            f"teacher {name!r} is served over HTTP, which cannot carry whole distributions; use a local "
            "teacher, or a method on sampled tokens or top_k"
        )
    if want.top_k and want.candidates_BTK is not None:
        raise TeacherError("ask for the teacher's top_k or for the student's candidates, not for both at once")
    width = max((len(row.completion_ids) for row in rows), default=0)
    shape = None if want.candidates_BTK is None else tuple(want.candidates_BTK.shape)
    if shape is not None and (shape[0] != len(rows) or shape[1] < width):
        raise TeacherError(
            f"candidates_BTK has shape {shape}; it needs {len(rows)} rows of at least {width} tokens, one for each "
            "completion"
        )
    for i, row in enumerate(rows):
        if row.images:
            raise TeacherCannot(f"row {i} has images, which a served teacher is not sent; use a local teacher")
        if not row.prompt_ids:
            raise TeacherMismatch(
                f"row {i} has an empty prompt, so nothing predicts its first token; begin it with the BOS id"
            )
        largest = max((*row.prompt_ids, *row.completion_ids))
        if vocab_size is not None and largest >= vocab_size:
            raise TeacherMismatch(
                f"row {i} has id {largest}, and teacher {name!r} knows {vocab_size} ids; give a "
                "teacher of the student's vocabulary"
            )


def unique_asks(rows: Sequence[Row], want: Want) -> tuple[list[Ask], list[int | None]]:
    """The different sequences to ask for, and which of them answers each row; None for an empty completion."""
    candidates = None if want.candidates_BTK is None else want.candidates_BTK.cpu().numpy().astype(np.int64)
    asks: list[Ask] = []
    place: dict[tuple[tuple[int, ...], tuple[int, ...], bytes], int] = {}
    owner_B: list[int | None] = []
    for i, row in enumerate(rows):
        if not row.completion_ids:
            owner_B.append(None)
            continue
        ids_TK = None if candidates is None else candidates[i, : len(row.completion_ids)]
        key = (row.prompt_ids, row.completion_ids, b"" if ids_TK is None else ids_TK.tobytes())
        if key not in place:
            place[key] = len(asks)
            asks.append(Ask(prompt_ids=row.prompt_ids, completion_ids=row.completion_ids, candidate_ids_TK=ids_TK))
        owner_B.append(place[key])
    return asks, owner_B


def assembled(rows: Sequence[Row], owner_B: Sequence[int | None], run: Run, want: Want) -> TeacherScores:
    """The answer for all rows from those of the different sequences; a row without one is named in `failures`."""
    shape = (len(rows), max((len(row.completion_ids) for row in rows), default=0))
    logprob_BT = np.full(shape, np.nan, dtype=np.float32)
    num_support = want.top_k if want.candidates_BTK is None else want.candidates_BTK.shape[2]
    ids_BTK = np.full((*shape, num_support), -1, dtype=np.int64)
    top_BTK = np.full(ids_BTK.shape, -np.inf, dtype=np.float32)
    failures: dict[int, str] = {}
    for i, owner in enumerate(owner_B):
        if owner is None:
            continue
        scores = run.scores.get(owner)
        if scores is None:
            failures[i] = run.failures[owner]
            continue
        length = len(scores.logprob_T)
        logprob_BT[i, :length] = scores.logprob_T
        for kind, count in scores.flaws.items():
            run.count(f"{kind}_tokens", count)
        if scores.top_ids_TK is not None and scores.top_logprob_TK is not None:
            ids_BTK[i, :length] = scores.top_ids_TK
            top_BTK[i, :length] = scores.top_logprob_TK
    valid_BT = ~np.isnan(logprob_BT)
    logprob_BT[~valid_BT] = 0.0
    # a float32 of exactly 0 is a probability of 1; all along a row of some length it is rather a server's default
    is_zero_B = (logprob_BT == 0).all(axis=1) & (valid_BT.sum(axis=1) > 1)
    run.count("suspicious_rows", int(is_zero_B.sum()))
    run.count("rows", len(rows))
    run.count("failed_rows", len(failures))
    has_support = want.top_k > 0 or want.candidates_BTK is not None
    return TeacherScores(
        logprob_BT=torch.from_numpy(logprob_BT),
        valid_BT=torch.from_numpy(valid_BT),
        top_ids_BTK=torch.from_numpy(ids_BTK) if has_support else None,
        top_logprob_BTK=torch.from_numpy(top_BTK) if has_support else None,
        failures=failures,
        stats=run.stats,
    )
