"""`hybrid methods`: every method in a line, or one method's page in the terminal."""

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from hybrid.method_pages import first_line, in_order, method_page
from hybrid.methods import METHODS, method_of


def overview() -> RenderableType:
    """A table of all methods."""
    table = Table(title="methods", title_justify="left")
    for heading in ("name", "what it does", "needs", "responses per prompt"):
        table.add_column(heading, overflow="fold")
    for name, kind in in_order():
        table.add_row(name, first_line(kind), needs_of(name), f"{kind.min_generations} or more")
    return Group(table, Text("hybrid methods NAME tells more of one."))


def describe(name: str) -> RenderableType:
    """Everything about one method.

    Raises:
      ConfigError: there is no such method; names the nearest.
    """
    if name not in METHODS:
        method_of(name)
    return Markdown(method_page(name))


def needs_of(name: str) -> str:
    """The measurements that a method reads with its default settings, beside the student's own log-probs."""
    if "parts" in METHODS[name].model_fields:
        return "what its parts need"
    return ", ".join(sorted(method_of(name).build().needs - {"student_logprobs"}))
