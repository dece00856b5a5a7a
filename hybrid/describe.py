"""`hybrid methods`: every method in a line, or one method with its formula, needs and settings."""

import inspect
from typing import Any

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
    kind = METHODS[name] if name in METHODS else type(method_of(name))
    settings = Table(title="settings", title_justify="left", show_lines=True)
    for heading in ("key", "default", "meaning", "where the default was read"):
        settings.add_column(heading, overflow="fold")
    for key, field in kind.model_fields.items():
        if key != "name":
            default = "required" if field.is_required() else shown(field.default)
            settings.add_row(key, default, field.description or "", kind.sources.get(key, ""))
    return Group(
        Panel(Text(kind.formula), title=name, title_align="left", subtitle=kind.paper, subtitle_align="left"),
        Markdown(inspect.cleandoc(kind.__doc__ or "")),
        Text(f"needs: {', '.join(needs_of(name)) or 'nothing but the responses'}"),
        Text(f"responses per prompt: {kind.min_generations} or more"),
        settings,
    )


def first_sentence(kind: type[MethodConfig]) -> str:
    """The line that says what a method does."""
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def needs_of(name: str) -> list[str]:
    """The measurements that a method reads with its default settings; those of a mixture are its parts'."""
    if METHODS[name].model_fields.get("parts") is not None:
        return ["what its parts need"]
    always = {"student_logprobs"}
    return sorted(method_of(name).build().needs - always)


def shown(value: Any) -> str:
    """A default as it stands in a YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
