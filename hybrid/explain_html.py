"""Explanations as one page that works offline: tokens in the colour of their credit, numbers under the pointer."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template

from hybrid.explain import Explanation
from hybrid.explain_compare import agreements, differences, treatments
from hybrid.explain_table import changed_settings, reward_text, token_text

FAINTEST = 0.15
"""Opacity of the smallest credit that is not 0."""


def page(shown: Mapping[str, Explanation]) -> str:
    """The page for one method, or for several side by side.

    Args:
      shown: explanations of one record, by the name to show.
    """
    records = next(iter(shown.values())).records
    found = {(one.row, one.place) for one in differences(shown)}
    words = [f"{len(records.response_ids)} responses, {sum(records.lengths)} tokens"]
    words += [
        f"{a} and {b} treat {share:.1%} of them alike"
        for (a, b), share in agreements(shown).items()
        if share is not None
    ]
    template = Template(resources.files("hybrid").joinpath("explain_page.html").read_text(encoding="utf-8"))
    sides = {name: _Side(one) for name, one in shown.items()}
    return template.substitute(
        title=html.escape(" against ".join(shown)),
        subtitle=html.escape("; ".join(words)),
        columns=str(len(shown)),
        difference_key='<span class="t diff">treated differently</span>' if len(shown) > 1 else "",
        summaries="".join(summary(name, one) for name, one in shown.items()),
        responses="\n".join(response(sides, row, found) for row in range(len(records.response_ids))),
    )


class _Side:
    """What the page needs of one explanation, computed once."""

    def __init__(self, one: Explanation):
        self.one = one
        self.treatments = treatments(one)
        self.advantages, self.kl_weights = one.advantage_BT.tolist(), one.kl_weight_BT.tolist()
        self.largest_advantage = max((abs(x) for row in self.advantages for x in row), default=0.0)
        self.largest_kl_weight = max((abs(x) for row in self.kl_weights for x in row), default=0.0)


def summary(name: str, one: Explanation) -> str:
    """A method's settings, losses and metrics."""
    numbers = {f"loss/{key}": float(getattr(one.loss, key)) for key in ("policy", "kl", "sft", "total")}
    rows = "".join(
        f'<tr><td>{html.escape(key)}</td><td class="n">{"-" if value is None else f"{value + 0.0:.6g}"}</td></tr>'
        for key, value in {**numbers, **one.metrics}.items()
    )
    settings = html.escape(json.dumps(one.settings, ensure_ascii=False))
    return (
        f"<section><h2>{html.escape(name)}</h2><p class='faint'>{html.escape(str(changed_settings(one)))}</p>"
        f"<table>{rows}</table><details><summary class='faint'>all settings</summary><code>{settings}</code></details>"
        "</section>"
    )


def response(sides: Mapping[str, _Side], row: int, found: set[tuple[int, int]]) -> str:
    """One response, once per method."""
    records = next(iter(sides.values())).one.records
    prompt = records.prompts[row] if records.prompts else None
    cells = "".join(
        f"<div><p class='faint'>{html.escape(branch_text(side.one, row))}</p>"
        f"<div class='tokens'>{tokens(side, row, found)}</div></div>"
        for side in sides.values()
    )
    return (
        f"<div class='response'><h2>{html.escape(records.response_ids[row])} "
        f"<span class='faint'>reward {reward_text(records, row)}</span></h2>"
        + (f"<p class='faint'>{html.escape(prompt)}</p>" if prompt else "")
        + f"<div class='sides'>{cells}</div></div>"
    )


def branch_text(one: Explanation, row: int) -> str:
    """How many tokens train, and the branch that the response took."""
    kept, length = int(one.kept_BT[row].sum()), int(one.records.batch.mask_BT[row].sum())
    return f"{kept} of {length} kept" + (f", {one.branches[row]}" if one.branches[row] else "")


def tokens(side: _Side, row: int, found: set[tuple[int, int]]) -> str:
    """The coloured tokens of a response."""
    spelled = side.one.records.tokens and side.one.records.tokens[row] is not None
    spans = []
    for place, what in enumerate(side.treatments[row]):
        advantage, kl_weight = side.advantages[row][place], side.kl_weights[row][place]
        kinds = ["t", *_kinds(advantage, kl_weight, what), *(["diff"] if (row, place) in found else [])]
        style = f"--a:{_strength(advantage, side.largest_advantage)};--k:{_strength(kl_weight, side.largest_kl_weight)}"
        numbers = numbers_of(side, row, place, what)
        text = html.escape(token_text(side.one.records, row, place))
        spans.append(f'<span class="{" ".join(kinds)}" style="{style}" data-n="{numbers}">{text}</span>')
    return ("" if spelled else " ").join(spans)


def _kinds(advantage: float, kl_weight: float, what: str) -> list[str]:
    kinds = ["up" if advantage > 0 else "down"] if advantage else []
    return kinds + (["kl"] if kl_weight else []) + (["off"] if what == "not trained" else [])


def _strength(value: float, largest: float) -> str:
    """Opacity between the faintest and 0.85; 0 for a credit of 0."""
    return f"{FAINTEST + (0.85 - FAINTEST) * abs(value) / largest:.2f}" if value else "0"


def numbers_of(side: _Side, row: int, place: int, what: str) -> str:
    """What the pointer shows, with line ends as HTML has them in an attribute."""
    batch = side.one.records.batch
    lines = [
        f"token {place}, id {side.one.records.token_ids[row][place]}: {what}",
        f"advantage {side.advantages[row][place] + 0.0:.6g}",
        f"kl weight {side.kl_weights[row][place] + 0.0:.6g}",
    ]
    measured = {"student": batch.student_logprob_BT, "entropy": batch.entropy_BT, "kl": batch.reverse_kl_BT}
    lines += [f"{name} {float(value[row, place]):.4g}" for name, value in measured.items() if value is not None]
    lines += [
        f"{name} {float(view.logprob_BT[row, place]):.4g}"
        for name, view in batch.views.items()
        if name != "student" and bool(view.valid_BT[row, place])
    ]
    return html.escape("\n".join(lines)).replace("\n", "&#10;")
