"""`hybrid explain`: reads a record and a method's settings, and shows what the method would do with the record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pydantic_core
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from rich.console import Group, RenderableType

from hybrid.errors import ConfigError, DataError
from hybrid.explain import explanation
from hybrid.explain_compare import comparison
from hybrid.explain_html import page
from hybrid.explain_table import comparison_table, explanation_table
from hybrid.methods import METHODS, Method
from hybrid.methods.base import MethodConfig
from hybrid.read_config import problems_of
from hybrid.records import read_records
from hybrid.types import State
from hybrid.yaml_file import Document, load_document, override

KEYS_OF_AN_EXPLANATION = {"method", "responses", "loss", "metrics", "state"}


class _OnlyMethod(BaseModel):
    """The part of an experiment that explains; its errors are told as those of a whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method


def run_explain(
    file: Path,
    method: str | None,
    settings: Sequence[str],
    step: int | None,
    state: Path | None,
    as_json: bool,
    compare: str | None,
    html: Path | None,
) -> str | RenderableType:
    """What `hybrid explain` prints: JSON text, or renderables for a person.

    Args:
      file: the record.
      method: a method's name, or a YAML file that holds a method block or an experiment.
      settings: `key=value` or `method.key=value` each, as in a YAML; with `compare`, `NAME.key=value`.
      step: number of updates made before this batch; in a file of several steps, also which of them. None is the first
        recorded step, or 0.
      state: JSON file with the state of a stateful method, or an earlier explanation.
      as_json: one JSON object instead of tables.
      compare: methods whose treatment of each token is compared, with commas between them.
      html: page to write beside.

    Raises:
      HybridError: the record, the method, a setting or the state is wrong; the message says which and what to do.
    """
    if (method is None) == (compare is None):
        raise ConfigError("hybrid explain needs --method NAME or --compare NAME,NAME, and not both")
    if step is not None and step < 0:
        raise ConfigError(f"--step is the number of updates already made, so it is not negative; got {step}")
    records = read_records(file, step=step)
    if method is not None:
        chosen = {method: method_from(method, settings)}
    else:
        chosen = compared_methods(compare or "", settings)
    start = None if state is None else read_state(state)
    if start is not None and len(chosen) > 1:
        raise ConfigError("--state belongs to one method; explain them one by one")
    shown = {name: explanation(config, records, step=step, state=start) for name, config in chosen.items()}
    if html is not None:
        try:
            html.write_text(page(shown), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: cannot be written: {error.strerror}") from error
    if len(shown) == 1:
        only = next(iter(shown.values()))
        return json.dumps(only.to_dict(), allow_nan=False) if as_json else explanation_table(only)
    if as_json:
        return json.dumps(comparison(shown), allow_nan=False)
    return Group(*(explanation_table(one, title=name) for name, one in shown.items()), comparison_table(shown))


def method_from(name: str, settings: Sequence[str] = (), *, option: str = "--method") -> MethodConfig:
    """A method by its name, or from a YAML file, with settings over it.

    Raises:
      ConfigError: no such method, file or setting; the message has the nearest right name.
    """
    document = _method_document(name, option)
    try:
        document = override(document, [f"method.{setting.removeprefix('method.')}" for setting in settings])
        document = _with_nested_defaults(document)
        # JSON, because strict Python input would want tuples where a file has lists.
        return _OnlyMethod.model_validate_json(pydantic_core.to_json(document.values), strict=True).method
    except ValidationError as error:
        message = "\n".join(str(problem) for problem in problems_of(error, document))
    except ConfigError as error:
        message = str(error)
    raise ConfigError(message.replace("--set method.", "--set "))


def _with_nested_defaults(document: Document) -> Document:
    """The document with the rest of a nested default, such as a schedule, of which only a part was set."""
    block = document.values["method"]
    kind = METHODS.get(str(block.get("name"))) if isinstance(block, Mapping) else None
    filled = {}
    for key, field in kind.model_fields.items() if kind else ():
        if isinstance(field.default, BaseModel) and isinstance(block.get(key), Mapping):
            filled[key] = {**field.default.model_dump(mode="json"), **block[key]}
    return replace(document, values={"method": {**block, **filled}}) if filled else document


def _method_document(name: str, option: str) -> Document:
    """The document of a method: that of its file, cut to its method block, or one that says the name alone."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        said = f"{option} {name}"
        return Document({"method": {"name": name}}, {("method", "name"): said}, said)
    document = load_document(path)
    if "method" in document.values:
        places = {path: place for path, place in document.places.items() if path[0] == "method"}
        return Document({"method": document.values["method"]}, places, document.source)
    places = {("method", *path): place for path, place in document.places.items()}
    return Document({"method": document.values}, places, document.source)


def compared_methods(names: str, settings: Sequence[str]) -> dict[str, MethodConfig]:
    """The methods of `--compare a,b,c`; a setting begins with the name of the method it is meant for.

    Raises:
      ConfigError: fewer than two, one twice, or a setting that belongs to none of them.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if len(chosen) < 2 or len(set(chosen)) < len(chosen):
        raise ConfigError(f"--compare needs two or more different methods, as in --compare opd,opdvr; got {names!r}")
    labels = [Path(name).stem if name.endswith((".yaml", ".yml")) else name for name in chosen]
    for setting in settings:
        owner = setting.split(".", 1)[0]
        if owner not in labels:
            raise ConfigError(
                f"--set {setting}: with --compare, begin with the method's name, as in --set {labels[0]}.key=value"
            )
    return {
        label: method_from(
            name, [s.split(".", 1)[1] for s in settings if s.split(".", 1)[0] == label], option="--compare"
        )
        for label, name in zip(labels, chosen, strict=True)
    }


def read_state(path: Path) -> State:
    """The state in a JSON file: name -> numbers, or the `state` of an earlier explanation.

    Raises:
      DataError: no file, no JSON, or something else in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--state {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"--state {path}: no JSON: {error}") from error
    if isinstance(value, dict) and value.keys() == KEYS_OF_AN_EXPLANATION:
        value = value["state"]
    try:
        adapter = TypeAdapter(State, config=ConfigDict(strict=True, allow_inf_nan=False))
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole"
        advice = 'it holds lists of numbers by name, as {"kl_minima": [0.1]}'
        raise DataError(f"--state {path}: {key}: {first['msg'].lower()}; {advice}") from error
