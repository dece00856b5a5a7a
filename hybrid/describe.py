"""`hybrid methods`: every method in a line, or one method with its formula, needs and settings."""

import inspect

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from hybrid.method_pages import method_page
from hybrid.methods import METHODS, method_of
from hybrid.methods.base import MethodConfig


def overview() -> RenderableType:
    """A table of all methods."""
    table = Table(title="methods", title_justify="left", show_lines=False)
    for heading in ("name", "what it does", "needs", "responses"):
        table.add_column(heading, overflow="fold")
    for name, kind in sorted(METHODS.items()):
        table.add_row(
            name, first_sentence(kind), ", ".join(needs_of(name)), f"{kind.min_generations} or more per prompt"
        )
    return Group(table, Text("hybrid methods NAME tells more of one."))


def describe(name: str) -> RenderableType:
    """Everything about one method.

    Raises:
      ConfigError: there is no such method; names the nearest.
    """
    if name not in METHODS:
        method_of(name)
    return Markdown(method_page(name))


def first_sentence(kind: type[MethodConfig]) -> str:
    """The line that says what a method does."""
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def needs_of(name: str) -> list[str]:
    """The measurements that a method reads with its default settings; those of a mixture are its parts'."""
    if METHODS[name].model_fields.get("parts") is not None:
        return ["what its parts need"]
    always = {"student_logprobs"}
    return sorted(method_of(name).build().needs - always)
