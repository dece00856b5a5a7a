"""An explanation as tables for a person at a terminal; trained tokens are coloured."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid.explain import Explanation
from hybrid.explain_compare import agreements, differences, treatments
from hybrid.methods.base import MethodConfig
from hybrid.methods.mix import Mix
from hybrid.objective.objective import Objective
from hybrid.records import Records

STYLES: Mapping[str, str] = {
    "not trained": "dim",
    "up": "green",
    "down": "red",
    "pulled": "cyan",
    "pushed": "magenta",
}
"""Colour of the first word of a treatment."""

MOST_DIFFERENCES = 200
"""Rows of the table of differences; JSON and HTML have them all."""


def token_text(records: Records, row: int, place: int) -> str:
    """What to show of a token: its text where it was recorded, else its id."""
    tokens = records.tokens[row] if records.tokens else None
    return str(records.token_ids[row][place]) if tokens is None else visible(tokens[place])


def visible(token: str) -> str:
    """A token's text with white space that can be seen."""
    return token.replace("\n", "\\n").replace("\t", "\\t") or "''"


def legend() -> Text:
    """What the colours mean."""
    words = {"up": "raised", "down": "lowered", "pulled": "pulled to the teacher", "not trained": "not trained"}
    text = Text("Tokens: ")
    for name, words_for in words.items():
        text.append(words_for, style=STYLES[name])
        text.append("  ")
    return text


def explanation_table(one: Explanation, *, title: str | None = None) -> RenderableType:
    """Settings, one row per response with its tokens coloured, losses, metrics and state."""
    table = Table(title=title or one.name, caption=changed_settings(one), expand=True, show_lines=True)
    for name in ("response", "reward", "branch", "kept", "mean A"):
        table.add_column(name, justify="left" if name in ("response", "branch") else "right", no_wrap=True)
    table.add_column("tokens", ratio=1)
    for row, name in enumerate(one.records.response_ids):
        length = int(one.records.batch.mask_BT[row].sum())
        kept = int(one.kept_BT[row].sum())
        mean = float(one.advantage_BT[row].sum()) / kept if kept else 0.0
        table.add_row(
            Text(name),
            reward_text(one.records, row),
            one.branches[row] or "-",
            f"{kept}/{length}",
            f"{mean + 0.0:.4g}",
            coloured(one, row),
        )
    return Group(table, legend(), losses_table(one), *state_lines(one))


def changed_settings(one: Explanation) -> Text:
    """The settings that are not the method's defaults."""
    if isinstance(one.method, Objective):
        return Text("an objective of its own")
    return Text(changes(one.method) or "default settings")


def changes(method: MethodConfig) -> str:
    """The settings of a method that are not its defaults; the parts of a mixture with their weights."""
    if isinstance(method, Mix):
        return " + ".join(f"{brief(part.weight)} {part.method.name}({changes(part.method)})" for part in method.parts)
    fields = type(method).model_fields.items()
    changed = {key: getattr(method, key) for key, field in fields if getattr(method, key) != field.default}
    return ", ".join(f"{key}: {brief(value)}" for key, value in changed.items() if key != "name")


def brief(value: object) -> str:
    """A setting's value in few letters."""
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.model_dump().items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def reward_text(records: Records, row: int) -> str:
    """The reward of a response; - where none was measured, ? where it is unscored."""
    if records.batch.reward_B is None:
        return "-"
    reward = float(records.batch.reward_B[row])
    return "?" if reward != reward else f"{reward:.4g}"


def coloured(one: Explanation, row: int) -> Text:
    """The tokens of a response, each in the colour of its treatment."""
    text = Text()
    separator = "" if one.records.tokens and one.records.tokens[row] is not None else " "
    for place, what in enumerate(treatments(one)[row]):
        text.append(token_text(one.records, row, place), style=STYLES[what.split(",")[0]])
        text.append(separator)
    return text


def losses_table(one: Explanation) -> Table:
    """The three losses, their sum, and the metrics."""
    table = Table(show_header=False, box=None)
    for name in ("policy", "kl", "sft", "total"):
        table.add_row(f"loss/{name}", f"{float(getattr(one.loss, name)) + 0.0:.6g}")
    for name, mean in one.metrics.items():
        table.add_row(name, "-" if mean is None else f"{mean + 0.0:.6g}")
    return table


def state_lines(one: Explanation) -> Sequence[Text]:
    """How many numbers a stateful method remembers, and within which bounds."""
    return [
        Text(f"state {name}: {len(values)} numbers" + (f" in [{min(values):.4g}, {max(values):.4g}]" if values else ""))
        for name, values in one.state.items()
    ]


def comparison_table(shown: Mapping[str, Explanation]) -> RenderableType:
    """The tokens that the methods treat differently, and how often each pair agrees."""
    records = next(iter(shown.values())).records
    found = differences(shown)
    table = Table(title=f"{len(found)} tokens treated differently", title_justify="left")
    for name in ("response", "place", "token", *shown):
        table.add_column(name)
    for one in found[:MOST_DIFFERENCES]:
        cells = [
            Text(f"{what} {numbers_text(shown[name], one.row, one.place)}".rstrip(), style=STYLES[what.split(",")[0]])
            for name, what in one.treatments.items()
        ]
        table.add_row(
            Text(records.response_ids[one.row]), str(one.place), Text(token_text(records, one.row, one.place)), *cells
        )
    lines = [
        Text(f"{a} and {b} treat {'-' if share is None else f'{share:.1%}'} of the tokens alike")
        for (a, b), share in agreements(shown).items()
    ]
    if len(found) > MOST_DIFFERENCES:
        lines.append(Text(f"the first {MOST_DIFFERENCES} of {len(found)} are shown; --json and --html have them all"))
    return Group(table, *lines)


def numbers_text(one: Explanation, row: int, place: int) -> str:
    """The numbers of a token that are not 0."""
    numbers = (float(one.advantage_BT[row, place]), float(one.kl_weight_BT[row, place]))
    return " ".join(f"{number:.4g}" for number in numbers if number)
