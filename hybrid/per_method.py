"""Settings of single methods: each at its own learning rate, from the same start and on the same prompts.

An experiment has them under `student.per_method`; a sweep, which makes every cell anew, has any setting under its own
`per_method`. Both name a method by its label.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Own = Mapping[str, Any]
"""Settings by the label of a method; as read, so that anything may stand there."""


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted keys, whether they were written so or in blocks; of two for one key the later."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not {"name", "task"} & value.keys():
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value at a dotted key, copying what it goes through.

    A block is put key by key into the one that stands there; one that says what it is (`name`, `task`) takes its place.
    """
    head, _, rest = key.partition(".")
    inner = values.get(head)
    merges = isinstance(value, Mapping) and isinstance(inner, Mapping) and not {"name", "task"} & value.keys()
    if not rest and not merges:
        values[head] = value
        return
    values[head] = dict(inner) if isinstance(inner, Mapping) else {}
    for name, one in ((rest, value),) if rest else value.items():
        set_dotted(values[head], name, one)


def label_problem(label: str, labels: Iterable[str], what: str = "method with this label") -> str | None:
    """What is wrong with a label, or with the name of something else; None where there is such a thing."""
    labels = list(labels)
    if label in labels:
        return None
    near = difflib.get_close_matches(label, labels, n=1, cutoff=0.6)
    others = f"did you mean {near[0]}?" if near else f"there are {', '.join(labels) or 'none'}"
    return f"there is no {what}; {others}"


def experiment_overridden(before: Mapping[str, Any], after: Mapping[str, Any], overrides: Sequence[str]) -> Mapping:
    """An experiment's values without the settings of single methods that the command line has made void.

    `--set student.lr=1e-4` is meant for every method, so that no method keeps a rate of its own; and a method that the
    command line took out takes its settings along.

    Args:
      before: the file's values.
      after: the same with the command line's settings in them.
      overrides: those settings, `key=value` each.
    """
    student = after.get("student")
    if not isinstance(student, Mapping) or not isinstance(student.get("per_method"), Mapping):
        return after
    gone = set(rough_labels(before)) - set(rough_labels(after))
    own = {label: one for label, one in student["per_method"].items() if label not in gone}
    return {**after, "student": {**student, "per_method": _without(own, overrides, "student.")}}


def sweep_overridden(after: Mapping[str, Any], overrides: Sequence[str]) -> Mapping:
    """A sweep's values without the settings of single methods over which `--set settings.KEY=...` is put."""
    own = after.get("per_method")
    return {**after, "per_method": _without(own, overrides, "settings.")} if isinstance(own, Mapping) else after


def rough_labels(values: Mapping[str, Any]) -> list[str]:
    """The labels of the methods in a file that has not been checked yet."""
    compare = values.get("compare")
    methods = [values.get("method"), *(compare if isinstance(compare, list) else ())]
    names = [str(method.get("name")) for method in methods if isinstance(method, Mapping)]
    again = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}_{number + 1}" if number else name for name, number in zip(names, again, strict=True)]


def _without(own: Own, overrides: Sequence[str], prefix: str) -> Own:
    given = [setting.partition("=")[0].strip() for setting in overrides]
    void = [key.removeprefix(prefix) for key in given if key.startswith(prefix)]

    def is_void(key: str) -> bool:
        return any(key == one or key.startswith(f"{one}.") for one in void)

    return {
        label: {key: value for key, value in flat(one).items() if not is_void(key)} if isinstance(one, Mapping) else one
        for label, one in own.items()
    }
