"""How the rows of a batch are cut into pieces: sorted by length, at a budget of padded tokens, and put back.

Shape letters: R rows of a piece, S segments that are padded apart from each other (prompt, completion, ...).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_PADDING = 0.15
"""Share of padding above which rows are cut further than the budget asks for."""

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Some rows of a batch, and how wide they are without the padding that only other rows need.

    Attributes:
      rows_R: their numbers.
      prompt: positions of their longest prompt, which end where all prompts end.
      completion: positions of their longest completion.
    """

    rows_R: Tensor
    prompt: int
    completion: int

    def of(self, value: Tensor) -> Tensor:
        """The piece of a [B, T, ...] tensor."""
        return value[self.rows_R.to(value.device), : self.completion]


def even_pieces(mask_BT: Tensor, prompt: int, size: int) -> list[Piece]:
    """All rows in their order, `size` at a time, as wide as the batch."""
    rows_B = torch.arange(len(mask_BT), device=mask_BT.device)
    return [Piece(rows_R, prompt, mask_BT.shape[1]) for rows_R in rows_B.split(size)]


def placed(values: Sequence[Tensor], pieces: Sequence[Piece], like_BT: Tensor, fill: float = 0.0) -> Tensor:
    """The [B, T, ...] tensor whose pieces are given; `fill` stands where a piece was trimmed."""
    out = values[0].new_full((*like_BT.shape, *values[0].shape[2:]), fill)
    for value, piece in zip(values, pieces, strict=True):
        out[piece.rows_R, : piece.completion] = value
    return out


def lengths_of(*masks: Tensor, multiple: int = 1) -> Lengths:
    """The width that each row needs of each segment, [B, S]; at least 1, and a multiple where one is asked for."""
    lengths = torch.stack([mask.long().sum(1) for mask in masks], 1).clamp(min=1).cpu().numpy()
    return -(-lengths // multiple) * multiple


def padded_tokens(lengths_RS: Lengths) -> int:
    """Positions of these rows when each segment is as wide as the longest of it."""
    return int(len(lengths_RS) * lengths_RS.max(0).sum())


def padding_share(lengths_BS: Lengths, cuts: Sequence[Sequence[int]]) -> float:
    """Share of positions that hold padding."""
    return 1 - lengths_BS.sum() / sum(padded_tokens(lengths_BS[list(rows)]) for rows in cuts)


def cut_rows(lengths_BS: Lengths, budget: int, count: int = 1) -> list[list[int]]:
    """Cuts rows, longest first, into pieces of at most `budget` padded tokens; a longer row stands alone.

    What does not fit into one piece is cut further, where that saves most, until padding is at most `MOST_PADDING` of
    all positions, and until there are `count` pieces.

    Args:
      lengths_BS: see `lengths_of`.
      budget: padded tokens of a piece.
      count: pieces that there must be at least, if there are as many rows.

    Returns:
      The numbers of the rows of each piece.
    """
    order = [int(row) for row in np.argsort(-lengths_BS.sum(1), kind="stable")]
    pieces: list[list[int]] = []
    widths_S = np.zeros(lengths_BS.shape[1], dtype=np.int64)
    for row in order:
        widths_S = np.maximum(widths_S, lengths_BS[row])
        if not pieces or widths_S.sum() * (len(pieces[-1]) + 1) > budget:
            pieces.append([])
            widths_S = lengths_BS[row]
        pieces[-1].append(row)
    splits = [_best_split(lengths_BS[rows]) for rows in pieces]
    target = lengths_BS.sum() / (1 - MOST_PADDING)
    total, is_cut = sum(padded_tokens(lengths_BS[rows]) for rows in pieces), len(pieces) > 1
    while len(pieces) < min(count, len(order)) or (is_cut and total > target):
        worst = max(range(len(pieces)), key=lambda place: (splits[place][0], len(pieces[place])))
        saved, at = splits[worst]
        parts = [pieces[worst][:at], pieces[worst][at:]]
        pieces[worst : worst + 1] = parts
        splits[worst : worst + 1] = [_best_split(lengths_BS[rows]) for rows in parts]
        total -= saved
    return _joined(pieces, lengths_BS, budget, count, int(target) - total) if is_cut else pieces


def _joined(pieces: list[list[int]], lengths_BS: Lengths, budget: int, count: int, spare: int) -> list[list[int]]:
    """Joins neighbours that fit together, as long as no more than `spare` tokens of padding are added."""

    def added(place: int) -> float:
        first, second = pieces[place], pieces[place + 1]
        tokens = padded_tokens(lengths_BS[first + second])
        apart = padded_tokens(lengths_BS[first]) + padded_tokens(lengths_BS[second])
        return tokens - apart if tokens <= budget else math.inf

    costs = [added(place) for place in range(len(pieces) - 1)]
    while len(pieces) > max(count, 1) and (cost := min(costs)) <= spare:
        place = costs.index(cost)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        spare -= int(cost)
        costs[place : place + 1] = []
        for near in (place - 1, place):
            if 0 <= near < len(costs):
                costs[near] = added(near)
    return pieces


def _best_split(lengths_RS: Lengths) -> tuple[int, int]:
    """The padded tokens that the best cut of some rows saves, and its place; -1 where there is but one row."""
    num = len(lengths_RS)
    if num == 1:
        return -1, 0
    sizes = np.arange(1, num)
    before = np.maximum.accumulate(lengths_RS, 0).sum(1)[:-1] * sizes
    after = np.maximum.accumulate(lengths_RS[::-1], 0).sum(1)[::-1][1:] * sizes[::-1]
    saved = padded_tokens(lengths_RS) - before - after
    best = np.flatnonzero(saved == saved.max())
    place = int(best[np.abs(best - num // 2).argmin()])
    return int(saved[place]), place + 1
