"""Writes `docs/settings.md` from the settings' own classes: `python -m hybrid.settings_page [FILE]`."""

import collections.abc
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hybrid.config import (
    EngineConfig,
    EvaluateConfig,
    ExperimentConfig,
    LoraConfig,
    OwnOptimizerConfig,
    RolloutsConfig,
    StudentConfig,
    TrackingConfig,
    TrainConfig,
)
from hybrid.data import DataConfig, GymSource
from hybrid.methods import METHODS
from hybrid.methods.mix import Part
from hybrid.objective.schedules import Schedule
from hybrid.rewards import ExactConfig, FormatConfig, MathConfig, PythonConfig, ReasoningGymConfig
from hybrid.sweep_config import SweepConfig
from hybrid.teacher_config import (
    ContextConfig,
    LocalTeacherConfig,
    PromptConfig,
    RecordedTeacherConfig,
    RequestsConfig,
    RoutedTeacherConfig,
    SelfConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    ServerConfig,
)

PAGE = Path("docs/settings.md")

INTRODUCTION = """# Settings

Every key that an experiment's YAML may have. This page is written by `make docs` from the classes that read the file,
and a test holds it to them. What a file leaves out has the default given here; a key that is not here is refused, with
its line and the nearest right name.

Any setting can be given on the command line too: `hybrid train FILE --set train.steps=20 --set student.lr=1e-5`. List
items are counted from 0 (`--set rewards.0.weight=2`). A new `method.name` drops the settings of the old method.

Numbers and truth values are those of YAML 1.2: `1e-6` is a number, `010` is 10, `12:30`, `on` and `no` are texts.
Anchors (`&name`, `*name`) work; merge keys (`<<`) are not of YAML 1.2, and `${NAME}` is no variable.

From the environment: `HYBRID_CACHE` is the folder of the embedded models, `HYBRID_VLLM_PYTHON` the Python whose vLLM
serves teachers, `HYBRID_TEACHER_API_KEY` the key of a served teacher; `HF_TOKEN`, `MLFLOW_TRACKING_USERNAME` and the
like are read by the libraries themselves.
"""

SECTIONS: Sequence[tuple[str, str, type[BaseModel]]] = (
    ("The experiment", "", ExperimentConfig),
    ("student", "student", StudentConfig),
    ("student.lora", "student.lora", LoraConfig),
    ("student.per_method", "student.per_method.LABEL", OwnOptimizerConfig),
    ("teacher: a model of this process", "teacher", LocalTeacherConfig),
    ("teacher: a vLLM server", "teacher", ServedTeacherConfig),
    ("teacher.requests", "teacher.requests", RequestsConfig),
    ("teacher.serve", "teacher.serve", ServerConfig),
    ("teacher: the student itself", "teacher", SelfTeacherConfig),
    ("teacher.self", "teacher.self", SelfConfig),
    ("teacher: a recording", "teacher", RecordedTeacherConfig),
    ("teacher: several", "teacher", RoutedTeacherConfig),
    ("teacher.context", "teacher.context", ContextConfig),
    ("teacher.prompt", "teacher.prompt", PromptConfig),
    ("data", "data", DataConfig),
    ("data.source: a reasoning-gym task", "data.source", GymSource),
    ("rewards: math", "rewards.N", MathConfig),
    ("rewards: reasoning_gym", "rewards.N", ReasoningGymConfig),
    ("rewards: exact", "rewards.N", ExactConfig),
    ("rewards: format", "rewards.N", FormatConfig),
    ("rewards: python", "rewards.N", PythonConfig),
    ("train", "train", TrainConfig),
    ("evaluate", "evaluate", EvaluateConfig),
    ("tracking", "tracking", TrackingConfig),
    ("engine", "engine", EngineConfig),
    ("engine.rollouts", "engine.rollouts", RolloutsConfig),
    ("A number that is a schedule", "NUMBER", Schedule),
    ("A sweep file (hybrid sweep)", "", SweepConfig),
)

_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "any value"}
)
_BOUNDS = (
    (annotated_types.Ge, "ge", "≥"),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "≤"),
    (annotated_types.Lt, "lt", "<"),
)


def settings_page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    parts += [section(title, prefix, kind) for title, prefix, kind in SECTIONS]
    for name, kind in sorted(METHODS.items()):
        parts.append(section(f"method: {name}", "method", kind))
        if name == "mix":
            parts.append(section("method.parts", "method.parts.N", Part))
    return "\n".join(parts)


def section(title: str, prefix: str, kind: type[BaseModel]) -> str:
    """One class as a heading, its first paragraph and a table of its keys."""
    about = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    lines = [f"## {title}", "", " ".join(about.split()), "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in sorted(kind.model_fields.items(), key=lambda pair: not pair[1].is_required()):
        key = ".".join(part for part in (prefix, field.alias or name) if part)
        cells = (f"`{key}`", value_of(field), default_of(field), field.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def value_of(field: FieldInfo) -> str:
    """What may stand there, in words, with its bounds."""
    bounds = [
        f"{sign} {getattr(note, name)}"
        for note in field.metadata
        for kind, name, sign in _BOUNDS
        if isinstance(note, kind)
    ]
    return ", ".join([words(field.annotation), *bounds])


def words(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [f"{sign} {getattr(n, name)}" for n in arguments[1:] for k, name, sign in _BOUNDS if isinstance(n, k)]
        return ", ".join([words(arguments[0]), *bounds])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(argument) for argument in arguments))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (tuple, list):
        return f"list of {words(arguments[0])}"
    if origin in (dict, collections.abc.Mapping):
        return f"mapping of names to {words(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tag = annotation.model_fields.get("name")
        return "mapping" if tag is None or tag.is_required() else "mapping with a `name`"
    return _WORDS.get(annotation, str(annotation))


def default_of(field: FieldInfo) -> str:
    """The default as it stands in a YAML."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return (
            "the defaults below"
            if isinstance(field.default_factory, type) and issubclass(field.default_factory, BaseModel)
            else "`{}`"
        )
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`".replace(" ", "")
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(settings_page(), encoding="utf-8")
