"""From a YAML file to an `ExperimentConfig`, or to one line per error: file, line, key, what is wrong, what to do."""

import difflib
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic_core
from pydantic import BaseModel, Tag, ValidationError

from hybrid.config import ExperimentConfig
from hybrid.consistency import contradictions
from hybrid.errors import ConfigError
from hybrid.per_method import experiment_overridden
from hybrid.trl_fields import OWN_NAMES
from hybrid.yaml_file import Document, KeyPath, dotted, load_document, override

_PLAIN: Mapping[str, str] = types.MappingProxyType(
    {
        "bool_parsing": "should be true or false",
        "bool_type": "should be true or false",
        "float_parsing": "should be a number",
        "float_type": "should be a number",
        "int_from_float": "should be a whole number",
        "int_parsing": "should be a whole number",
        "int_type": "should be a whole number",
        "list_type": "should be a list",
        "mapping_type": "should be a mapping",
        "dict_type": "should be a mapping",
        "string_type": "should be a text",
        "tuple_type": "should be a list",
    }
)


_OF_CLASS = frozenset({"model_type", "model_attributes_type", "dataclass_type"})
_OF_TYPE = _OF_CLASS | frozenset(_PLAIN)


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong with an experiment file.

    Attributes:
      place: `file.yaml:7`, `--set a=b`, or the file.
      key: dotted key, with the method's or reward's name where it chooses the keys below it.
      message: what is wrong and what to do.
    """

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        """The problem as one line."""
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Reads an experiment file, with settings of the command line over it.

    Args:
      path: the YAML file.
      overrides: `a.b.c=value` each, as `--set` takes them.

    Raises:
      ConfigError: one line per error, each with file, line, key and what to do.
    """
    return validated(read_document(path, overrides))


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """What stands in an experiment file and on the command line, not yet checked; see `read_experiment`."""
    before = load_document(path)
    after = override(before, overrides)
    return replace(after, values=experiment_overridden(before.values, after.values, overrides))


def validated(document: Document) -> ExperimentConfig:
    """The experiment of a document; see `read_experiment`."""
    try:
        # JSON, because strict Python input would want tuples where a file has lists
        config = ExperimentConfig.model_validate_json(pydantic_core.to_json(document.values), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(map(str, problems_of(error, document)))) from None
    found = [Problem(document.place(path), dotted(path), message) for path, message in contradictions(config)]
    if found:
        raise ConfigError("\n".join(map(str, _in_order(found))))
    return config


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """Pydantic's errors, one per value, in the words of the file's author."""
    by_path: dict[KeyPath, list[tuple[KeyPath, pydantic_core.ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_raw_path(details, document.values), []).append((details["loc"], details))
    unknown = [
        (path, _nearest(group[0][0])) for path, group in by_path.items() if group[0][1]["type"] == "extra_forbidden"
    ]
    meant = {(*path[:-1], near) for path, near in unknown}
    found = []
    for path, group in by_path.items():
        if group[0][1]["type"] == "missing" and path in meant:
            continue  # told with the misspelt key
        deeper = any(other[: len(path)] == path and other != path for other in by_path)
        if deeper and len(group[0][0]) > len(path) and group[0][1]["type"] not in ("missing", "extra_forbidden"):
            continue  # the value is meant as another member of a union, whose errors lie below
        # a union member whose type fits and whose value does not says more than those whose type does not fit
        telling = [pair for pair in group if pair[1]["type"] not in _OF_TYPE] or group
        messages = dict.fromkeys(_message(loc, details) for loc, details in telling)
        loc, details = telling[0]
        shown = _shown(loc, path, document.values)
        if details["type"] == "union_tag_invalid":
            path, shown = (*path, "name"), f"{shown}.name"
        found.append(Problem(document.place(path), shown, _with_value(" or ".join(messages), details)))
    return _in_order(found)


def _in_order(found: Sequence[Problem]) -> list[Problem]:
    def line(problem: Problem) -> tuple[str, int]:
        file, _, number = problem.place.rpartition(":")
        return (file, int(number)) if number.isdecimal() else (problem.place, 0)

    return sorted(found, key=line)


def _raw_path(details: pydantic_core.ErrorDetails, values: Any) -> KeyPath:
    """The part of an error's location that stands in the file; the names of union members do not."""
    path: list[str | int] = []
    last = len(details["loc"]) - 1
    for place, part in enumerate(details["loc"]):
        if _has(values, part):
            values = values[part]
        elif not (place == last and details["type"] in ("missing", "extra_forbidden")):
            continue
        path.append(part)
    return tuple(path)


def _has(values: Any, part: str | int) -> bool:
    return part in values if isinstance(values, Mapping) else isinstance(values, list) and isinstance(part, int)


def _shown(loc: KeyPath, path: KeyPath, values: Any) -> str:
    """The key as it is shown: `method.kat.window`, with the chosen name in it."""
    shown: list[str | int] = []
    rest = list(path)
    for part in loc:
        if rest and part == rest[0]:
            shown.append(rest.pop(0))
            values = values[part] if _has(values, part) else None
        elif isinstance(values, Mapping) and values.get("name") == part:
            shown.append(part)
    return dotted(shown)


def _message(loc: KeyPath, details: pydantic_core.ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(loc)
    if kind == "missing":
        fields = _fields_at(loc[:-1])
        about = fields.get(str(loc[-1]), "")
        return textwrap.shorten(f"is missing: {about}".rstrip(": "), 120, placeholder=" ...")
    if kind == "union_tag_not_found":
        return f"has no name, which would say what it is; there are {_names_at(loc)}"
    if kind == "union_tag_invalid":
        return f"there is no '{context['tag']}'{_near(context['tag'], sorted(_list_of(context)))}"
    if kind == "literal_error":
        return f"should be {context['expected']}"
    if kind in _OF_CLASS:
        return f"should be a mapping with {', '.join(_fields_at(loc))}"
    if kind == "value_error":
        return str(context["error"])
    plain = _PLAIN.get(kind)
    return plain if plain is not None else details["msg"].partition(" ")[2]  # "Input should ..." and the like


def _with_value(message: str, details: pydantic_core.ErrorDetails) -> str:
    if details["type"] in ("extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found", "value_error"):
        return message
    value = pydantic_core.to_json(details["input"], fallback=str).decode()
    return f"{message}; got {value if len(value) <= 80 else value[:77] + '...'}"


def _list_of(context: Mapping[str, Any]) -> list[str]:
    return [name.strip(" '") for name in str(context["expected_tags"]).split(",")]


def _near(name: str, names: Sequence[str]) -> str:
    """What follows an unknown name: the nearest one, or all."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"


def _unknown_key(loc: KeyPath) -> str:
    key, near = str(loc[-1]), _nearest(loc)
    if near == key:
        return f"is no key of a {loc[-2]}, which the other keys say it is; there are {', '.join(_fields_at(loc[:-1]))}"
    if near is not None:
        return f"unknown key; did you mean {near}?"
    elsewhere = [path for path in _all_keys() if path.rpartition(".")[2] == key] + [OWN_NAMES.get(key, "")]
    if elsewhere[0]:
        return f"unknown key here; did you mean {elsewhere[0]}?"
    return f"unknown key; there are {', '.join(_fields_at(loc[:-1]))}"


def _nearest(loc: KeyPath) -> str | None:
    """The key that an unknown one was probably meant to be."""
    fields = _fields_at(loc[:-1])
    around = loc[:-1]
    if str(around[-1:]).endswith(" teacher',)"):
        fields = _fields_at(around[:-1])  # the kind of a teacher was itself taken from its keys
    near = difflib.get_close_matches(str(loc[-1]), fields, n=1, cutoff=0.7)
    return near[0] if near else None


def _all_keys() -> list[str]:
    """The dotted keys of the fixed sections."""
    found = []
    for section, field in ExperimentConfig.model_fields.items():
        found.append(section)
        classes = _members(field.annotation)
        if len(classes) == 1 and section not in ("compare", "rewards"):
            found += [f"{section}.{key}" for key in _fields_of(classes[0])]
    return found


def _names_at(loc: KeyPath) -> str:
    names = [kind.model_fields["name"].default for kind in _classes_at(loc) if "name" in kind.model_fields]
    return ", ".join(sorted(map(str, names)))


def _fields_at(loc: KeyPath) -> dict[str, str]:
    """The keys that a mapping at `loc` may have, each with what it means."""
    return {key: about for kind in _classes_at(loc) for key, about in _fields_of(kind).items()}


def _fields_of(kind: type[BaseModel]) -> dict[str, str]:
    return {field.alias or name: field.description or "" for name, field in kind.model_fields.items()}


def _classes_at(loc: KeyPath) -> list[type[BaseModel]]:
    kinds: list[Any] = [ExperimentConfig]
    for part in loc:
        kinds = [inner for kind in kinds for inner in _step(kind, part)]
    return [kind for annotation in kinds for kind in _members(annotation)]


def _step(annotation: Any, part: str | int) -> list[Any]:
    """The annotations that one part of an error's location leads to."""
    found = []
    for member, tag in _tagged(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            fields = {field.alias or name: field for name, field in member.model_fields.items()}
            name = member.model_fields["name"].default if "name" in member.model_fields else None
            if part in (tag, member.__name__, name):
                found.append(member)
            elif part in fields:
                found.append(fields[str(part)].annotation)
        elif get_origin(member) in (tuple, list) and isinstance(part, int):
            found.append(get_args(member)[0])
        elif get_origin(member) in (Mapping, dict):
            found.append(get_args(member)[1])
        elif not isinstance(part, int):
            found.append(member)
    return found


def _members(annotation: Any) -> list[type[BaseModel]]:
    return [member for member, _ in _tagged(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def _tagged(annotation: Any, tag: str | None = None) -> list[tuple[Any, str | None]]:
    """The members of a union with the tag that chooses each."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        return _tagged(inner, next((note.tag for note in notes if isinstance(note, Tag)), tag))
    if origin in (Union, types.UnionType):
        return [pair for member in get_args(annotation) for pair in _tagged(member)]
    return [] if annotation is type(None) or origin is Literal else [(annotation, tag)]
