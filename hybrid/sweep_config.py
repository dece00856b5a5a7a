"""The sweep file: an experiment, and what varies over its cells (tasks x variations x methods x seeds)."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hybrid.config import ExperimentConfig, Name
from hybrid.errors import ConfigError
from hybrid.per_method import flat, label_problem, set_dotted, sweep_overridden
from hybrid.read_config import Problem, validated
from hybrid.teacher_config import Settings
from hybrid.yaml_file import Document, KeyPath, dotted, load_document, override


class SweepConfig(Settings):
    """A grid over one experiment. Seeds are matched: the same start, prompts in order and held-out set everywhere."""

    base: str = Field(description="The experiment's YAML file, as seen from the sweep file's folder.")
    name: Name = Field(description="Names the sweep's folder and its MLflow experiment.")
    seeds: int | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(
        default=8, description="How many seeds, counted from 0; or the seeds."
    )
    methods: tuple[Mapping[str, Any], ...] = Field(
        default=(), description="Methods with their settings; none are those of the experiment."
    )
    tasks: Mapping[str, Mapping[str, Any]] = Field(
        default_factory=dict, description="Tasks by name, each with the settings (dotted keys) that make it."
    )
    vary: Mapping[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="Settings (dotted keys) and the values that they take in turn."
    )
    settings: Mapping[str, Any] = Field(
        default_factory=dict, description="Settings of every cell, by dotted keys or in blocks that are merged."
    )
    per_method: Mapping[str, Mapping[str, Any]] = Field(
        default_factory=dict,
        description="Settings (dotted keys) of single methods by label: `{grpo: {student.lr: 3e-4}}`. They win over "
        "`tasks` and `settings`, and `vary` over them.",
    )
    baseline: str | None = Field(default=None, description="The method that the others are compared with.")
    only: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Methods (by label) that run on these tasks alone."
    )
    jobs: int | None = Field(
        default=None, ge=1, description="Cells at once; null is one per GPU, without any one per core."
    )
    target: float | None = Field(
        default=None, ge=0, le=1, description="Accuracy to reach, for the costs; null is the baseline's."
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training of a sweep."""

    task: str
    label: str
    seed: int
    config: ExperimentConfig

    @property
    def name(self) -> str:
        """Names the cell's folder."""
        return "/".join(part for part in (self.task, self.label, f"seed{self.seed}") if part)


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> tuple[SweepConfig, list[Cell]]:
    """Reads a sweep file and makes its cells, seeds outermost, so that an early stop leaves whole comparisons.

    Args:
      path: the sweep file.
      overrides: `a.b=value` settings of the sweep file.

    Raises:
      ConfigError: one line per error; those of a cell name the cell.
    """
    document = override(load_document(path), overrides)
    document = replace(document, values=sweep_overridden(document.values, overrides))
    try:
        sweep = SweepConfig.model_validate(document.values)
    except ValidationError as error:
        raise ConfigError("\n".join(sweep_problems(error, document))) from None
    base = path.parent / sweep.base
    seeds = range(sweep.seeds) if isinstance(sweep.seeds, int) else sweep.seeds
    plain = load_document(base)
    methods = sweep.methods or (plain.values["method"], *plain.values.get("compare", ()))
    tasks = sweep.tasks or {"": {}}
    variations = [dict(zip(sweep.vary, values, strict=True)) for values in product(*sweep.vary.values())]
    labels = labels_of(methods)
    plain, of_base = without_own(plain)
    cells = []
    checked: dict[tuple[str, str], ExperimentConfig] = {}  # a check takes its time, and seeds change nothing of it
    for seed, (task, settings), (label, method), varied in product(
        seeds, tasks.items(), zip(labels, methods, strict=True), variations
    ):
        if label in sweep.only and task not in sweep.only[label]:
            continue
        full = variation_label(label, varied)
        if (task, full) not in checked:
            own = (of_base.get(label, {}), sweep.settings, settings, sweep.per_method.get(label, {}), varied)
            changes = (*map(flat, own), {"seed": seed, "name": sweep.name})
            checked[task, full] = cell_config(plain, method, changes, f"{path}: cell {task} {label} seed {seed}")
        config = checked[task, full].model_copy(update={"seed": seed})
        cells.append(Cell(task=task, label=full, seed=seed, config=config))
    refuse_unknown_labels(sweep, labels, list(dict.fromkeys(cell.label for cell in cells)), document)
    if not cells:
        raise ConfigError(f"{path}: the sweep has no cell; give it seeds, methods and tasks")
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: the cell {twice} comes twice; give every seed and every value of vary once")
    return sweep, cells


def too_few_seeds(cells: Sequence[Cell]) -> str | None:
    """Says so where no difference between the methods could be shown, however large; None where one could."""
    from hybrid.compare.statistics import fewest_seeds

    num_seeds = len({cell.seed for cell in cells})
    num_compared = max(len({cell.label for cell in cells if cell.task == task}) for task in {c.task for c in cells}) - 1
    least = fewest_seeds(num_compared=max(1, num_compared))
    if num_compared == 0 or num_seeds >= least:
        return None
    return (
        f"with {num_seeds} seeds no difference can be shown at 95 %, however large, among {num_compared} comparisons "
        f"with the baseline: the exact test with Holm's correction needs {least}"
    )


def sweep_problems(error: ValidationError, document: Document) -> list[str]:
    """What is wrong with the sweep's own keys, one line each."""
    found = []
    for details in error.errors(include_url=False):
        key, message = str(details["loc"][0]), details["msg"]
        if details["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, SweepConfig.model_fields, n=1)
            others = f"did you mean {near[0]}?" if near else f"a sweep has {', '.join(SweepConfig.model_fields)}"
            message = f"unknown key; {others}"
        shown = ".".join(map(str, details["loc"]))
        found.append(str(Problem(document.place((key,)), shown, message)))
    return found


def labels_of(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label per method: `label` in the method's block, else its name, numbered where it comes again."""
    given = {str(method["label"]) for method in methods if "label" in method}
    labels: list[str] = []
    for method in methods:
        own = label = str(method.get("label", method.get("name")))
        is_given, number = "label" in method, 1
        while label in labels or (label in given and not (is_given and label == own)):
            number += 1
            label = f"{own}_{number}"
        labels.append(label)
    return labels


def variation_label(label: str, varied: Mapping[str, Any]) -> str:
    """A method's label with what varies, so that each variation is compared as a method of its own."""
    return "_".join([label, *(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in varied.items())])


def without_own(plain: Document) -> tuple[Document, dict[str, dict[str, Any]]]:
    """The base experiment without `student.per_method`, and what stood there, as settings of cells by label."""
    student = plain.values.get("student")
    own = student.get("per_method") if isinstance(student, Mapping) else None
    if not isinstance(own, Mapping) or not all(isinstance(one, Mapping) for one in own.values()):
        return plain, {}  # what is wrong there is told with the first cell
    shared = {key: value for key, value in plain.values["student"].items() if key != "per_method"}
    of_label = {
        label: {f"student.{key}": value for key, value in one.items() if value is not None}
        for label, one in own.items()
    }
    return replace(plain, values={**plain.values, "student": shared}), of_label


def refuse_unknown_labels(
    sweep: SweepConfig, labels: Sequence[str], of_cells: Sequence[str], document: Document
) -> None:
    """Makes sure that what is said of single methods is said of methods of the sweep.

    Raises:
      ConfigError: `per_method`, `only` or `baseline` names a method, or `only` a task, that the sweep has not.
    """
    named: list[tuple[KeyPath, str]] = [(("per_method", label), label) for label in sweep.per_method]
    named += [(("only", label), label) for label in sweep.only]
    wrong = [(path, label_problem(label, labels)) for path, label in named]
    if sweep.baseline is not None:
        wrong.append((("baseline",), label_problem(sweep.baseline, of_cells)))
    for label, tasks in sweep.only.items():
        wrong += [(("only", label), label_problem(task, sweep.tasks, "task of this name")) for task in tasks]
    found = [str(Problem(document.place(path), dotted(path), what)) for path, what in wrong if what is not None]
    if found:
        raise ConfigError("\n".join(found))


def cell_config(
    plain: Document, method: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], where: str
) -> ExperimentConfig:
    """The experiment of one cell.

    Args:
      plain: the base experiment.
      method: the cell's block of `methods`.
      changes: settings by dotted keys; later ones win.
      where: names the cell, for messages.

    Raises:
      ConfigError: the cell's settings do not fit; the message names the cell.
    """
    own = {key: value for key, value in method.items() if key != "label"}
    values: dict[str, Any] = {**plain.values, "method": own, "compare": []}
    for settings in changes:
        for key, value in settings.items():
            set_dotted(values, key, value)
    try:
        config = validated(Document(values=values, places=plain.places, source=plain.source))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if config.engine.kind != "single":
        raise ConfigError(
            f"{where}: engine.kind: a cell of a sweep is one process, on a GPU of its own where there are any, and "
            f"{config.engine.kind} wants more; write single, or train the cells with `hybrid train`"
        )
    return config
