"""Which tokens two methods treat differently."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hybrid.explain import Explanation


@dataclass(frozen=True)
class Difference:
    """A token that not all methods treat alike.

    Attributes:
      row, place: which response and which of its tokens, from 0.
      treatments: by method.
    """

    row: int
    place: int
    treatments: Mapping[str, str]


def treatment(advantage: float, kl_weight: float) -> str:
    """What a method does with a token: `up` or `down` its probability, `pulled` to the teacher or `pushed` from it.

    A token with neither is `not trained`, whether a gate closed on it or its credit is 0.
    """
    words = [
        "up" if advantage > 0 else "down" if advantage < 0 else "",
        "pulled" if kl_weight > 0 else "pushed" if kl_weight < 0 else "",
    ]
    return ", ".join(word for word in words if word) or "not trained"


def treatments(one: Explanation) -> list[list[str]]:
    """The treatment of each token of each response."""
    pairs = zip(one.advantage_BT.tolist(), one.kl_weight_BT.tolist(), one.records.lengths, strict=True)
    return [
        [treatment(*numbers) for numbers in zip(advantages[:length], kl_weights[:length], strict=True)]
        for advantages, kl_weights, length in pairs
    ]


def differences(shown: Mapping[str, Explanation]) -> list[Difference]:
    """The tokens that not all methods treat alike, in the order of the record."""
    by_method = {name: treatments(one) for name, one in shown.items()}
    lengths = next(iter(shown.values())).records.lengths
    found = []
    for row, length in enumerate(lengths):
        for place in range(length):
            here = {name: rows[row][place] for name, rows in by_method.items()}
            if len(set(here.values())) > 1:
                found.append(Difference(row, place, here))
    return found


def agreements(shown: Mapping[str, Explanation]) -> dict[tuple[str, str], float | None]:
    """Share of response tokens that each pair of methods treats alike; None where there is no token."""
    by_method = {name: treatments(one) for name, one in shown.items()}
    mask = next(iter(shown.values())).records.batch.mask_BT.tolist()
    out: dict[tuple[str, str], float | None] = {}
    for a, b in combinations(shown, 2):
        same = [
            x == y
            for row_a, row_b, mask_T in zip(by_method[a], by_method[b], mask, strict=True)
            for x, y, used in zip(row_a, row_b, mask_T[: len(row_a)], strict=True)
            if used
        ]
        out[a, b] = sum(same) / len(same) if same else None
    return out


def comparison(shown: Mapping[str, Explanation]) -> dict[str, Any]:
    """The object that `hybrid explain --compare a,b --json` prints."""
    explained = {name: one.to_dict() for name, one in shown.items()}
    records = next(iter(shown.values())).records

    def numbers(key: str, found: Difference) -> dict[str, float]:
        return {name: one["responses"][found.row][key][found.place] for name, one in explained.items()}

    return {
        "methods": explained,
        "differences": [
            {
                "response_id": records.response_ids[found.row],
                "token": found.place,
                "token_id": records.token_ids[found.row][found.place],
                "treatments": dict(found.treatments),
                "advantages": numbers("advantages", found),
                "kl_weights": numbers("kl_weights", found),
                "kept": numbers("kept", found),
            }
            for found in differences(shown)
        ],
        "agreements": [{"methods": [a, b], "share": share} for (a, b), share in agreements(shown).items()],
    }
