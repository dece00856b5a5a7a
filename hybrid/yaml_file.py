"""Experiment files: YAML as a reader expects it, with the line of every key, and overrides from the command line.

PyYAML follows YAML 1.1, where `1e-6` is a text, `010` is 8, `12:30` is 750 and `no` is false. Here numbers and truth
values are those of YAML 1.2; keys are always text; a key that stands twice in one mapping is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml

from hybrid.errors import ConfigError

Value: TypeAlias = Any
"""None, bool, int, float, str, or a list or dict of values."""

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the top of a file to a value."""

MAX_DEPTH = 50  # deeper than any experiment, and far from Python's recursion limit

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = (
    ("null", _NULL, "~nN"),
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _name, _pattern, _first in _RESOLVERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, [""])


@dataclass(frozen=True)
class Document:
    """What a file says, and where it says it.

    Attributes:
      values: the file's mapping.
      places: path of each key and list item -> where it stands, as `file.yaml:7` or `--set a.b=1`.
      source: name of the file.
    """

    values: Mapping[str, Value]
    places: Mapping[KeyPath, str]
    source: str

    def place(self, path: KeyPath) -> str:
        """Where the value at `path` stands, or else something in it, or else the nearest value around it."""
        inside = (place for other, place in self.places.items() if other[: len(path)] == path)
        if path not in self.places and path and (first := next(inside, None)):
            return first
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.source


def load_document(path: Path) -> Document:
    """Reads an experiment file.

    Args:
      path: a YAML file whose top is a mapping.

    Raises:
      ConfigError: it cannot be read, is no YAML, or has a key twice; the message begins with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error
    places: dict[KeyPath, str] = {}
    values = _read(text, str(path), places)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds {_kind_of(values)} where a mapping of settings belongs, such as `name: first`"
        )
    return Document(values, places, str(path))


def override(document: Document, settings: Sequence[str]) -> Document:
    """The document with settings of the command line in it.

    Args:
      document: as read from the file.
      settings: `a.b.c=value` each, later ones winning. A number in the path is a list index, and the list's length
        appends. The value is YAML. A new `name` of a method or reward drops what the old one had set.

    Raises:
      ConfigError: a setting has no `=`, or its path runs through a value that has no keys.
    """
    for setting in settings:
        document = _override(document, setting)
    return document


def dump_yaml(values: Value) -> str:
    """YAML that `load_document` reads back to the same values; keys keep their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dotted(path: Sequence[str | int]) -> str:
    """`("rewards", 0, "weight")` as `rewards.0.weight`."""
    return ".".join(str(part) for part in path)


def _override(document: Document, setting: str) -> Document:
    name, equals, text = setting.partition("=")
    source = f"--set {setting}"
    names = name.strip().split(".")
    if not equals or "" in names:
        raise ConfigError(f"{source}: write --set key.key=value, for example --set train.steps=100")
    path = _path(document.values, names, source)
    inner: dict[KeyPath, str] = {}
    value = _read(text, source, inner)
    is_new_kind = _names_a_kind(path) and _at(document.values, path) not in (None, value)
    if is_new_kind:
        path, value, inner = path[:-1], {"name": value}, dict[KeyPath, str]({("name",): source})
    places = {old: where for old, where in document.places.items() if old[: len(path)] != path}
    places |= {(*path, *rest): source for rest in inner} | {path: source}
    return replace(document, values=_put(document.values, path, value), places=places)


def _names_a_kind(path: KeyPath) -> bool:
    return path[-1] == "name" and (path[-2:-1] == ("method",) or path[0] in ("compare", "rewards"))


def _path(values: Value, names: Sequence[str], source: str) -> KeyPath:
    path: list[str | int] = []
    for name in names:
        if isinstance(values, list):
            if not name.isdecimal() or int(name) > len(values):
                raise ConfigError(f"{source}: {dotted(path)} is a list of {len(values)}; '{name}' is no index of it")
            path.append(int(name))
            values = values[int(name)] if int(name) < len(values) else None
        elif values is None or isinstance(values, Mapping):
            path.append(name)
            values = None if values is None else values.get(name)
        else:
            raise ConfigError(f"{source}: {dotted(path)} is {values!r}, which has no key '{name}'")
    return tuple(path)


def _put(values: Value, path: KeyPath, value: Value) -> Value:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        old = values[key] if key < len(values) else None
        return [*values[:key], _put(old, rest, value), *values[key + 1 :]]
    values = {} if values is None else values
    return {**values, key: _put(values.get(key), rest, value)}


def _at(values: Value, path: KeyPath) -> Value:
    for key in path:
        if isinstance(key, int):
            values = values[key] if key < len(values) else None
        else:
            values = None if values is None else values.get(key)
    return values


def _read(text: str, source: str, places: dict[KeyPath, str]) -> Value:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(node, (), source, places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{_line(source, mark)}: is no YAML: {what}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{source}: is no YAML: {str(error).splitlines()[0]}") from error


def _value(node: yaml.Node, path: KeyPath, source: str, places: dict[KeyPath, str]) -> Value:
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{_line(source, node.start_mark)}: is nested more than {MAX_DEPTH} deep")
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            places[(*path, index)] = _line(source, item.start_mark)
            items.append(_value(item, (*path, index), source, places))
        return items
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, source, places)
    return _scalar(node, source)


def _mapping(node: yaml.MappingNode, path: KeyPath, source: str, places: dict[KeyPath, str]) -> dict[str, Value]:
    mapping: dict[str, Value] = {}
    for key_node, item in node.value:
        where = _line(source, key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be a word")
        key = key_node.value
        if key in mapping:
            raise ConfigError(
                f"{where}: {dotted((*path, key))}: stands here for the second time, first at {places[(*path, key)]}; "
                "keep one of them"
            )
        places[(*path, key)] = where
        mapping[key] = _value(item, (*path, key), source, places)
    return mapping


def _scalar(node: yaml.Node, source: str) -> Value:
    text = str(node.value)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "str":
        return text
    if kind == "null":
        return None
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{_line(source, node.start_mark)}: '{text}' is no {kind}") from error
    raise ConfigError(f"{_line(source, node.start_mark)}: the tag '{node.tag}' is not used here; write the plain value")


def _line(source: str, mark: yaml.Mark | None) -> str:
    return source if mark is None or source.startswith("--set ") else f"{source}:{mark.line + 1}"


def _kind_of(value: Value) -> str:
    return "nothing" if value is None else "a list" if isinstance(value, list) else f"the value {value!r}"
