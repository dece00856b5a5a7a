"""A grid of trainings from one file: cells that resume one by one, run side by side, and are compared at the end.

Worker processes take cells one after another; a cell belongs to the worker that holds the lock on its folder, and the
lock goes with its process, however that ends. A finished cell has its result file; the next start passes it over.
Who only looks whether a cell is worked at tries a second lock, so that no worker takes the look for another worker.
"""

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hybrid.config import TINY, ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.launch import all_sent, quiet
from hybrid.progress import Bars
from hybrid.rewards import build_rewards
from hybrid.run_notes import note, sweep_note, training_note
from hybrid.sources import held_out_prompts, model_folder, training_prompts
from hybrid.stopping import EXIT_CODES, Stop
from hybrid.sweep_config import Cell, SweepConfig, read_sweep, too_few_seeds
from hybrid.teacher_config import LocalTeacherConfig, teachers_of
from hybrid.teaching import is_chat, teacher_of
from hybrid.tracking import Tracker
from hybrid.training import RESULT_FILE, Place, Setting, last_checkpoint, saved, train_method
from hybrid.whole_file import write_whole
from hybrid.workers import Worker, running_workers

FAILED_FILE = "failed.txt"
"""Why a cell failed; such a cell is tried again by the next start."""

MADE_OF_FILE = "made_of.json"
"""What a cell was run with: its settings, and which embedded models."""

FAILURES = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What a model, a verifier, a teacher or a full disk can raise; it fails a cell, and the others go on."""

OWNED, RUNNING = "lock", "running"
"""Locks in a cell's folder: of the worker that has it; and the same while it works, for those who look."""

LOOK_EVERY_S = 2.0
"""Seconds between two looks at what is done."""


@dataclass(frozen=True)
class State:
    """How far a cell is: waiting, running, done or failed; and its last accuracy."""

    name: str
    accuracy: float | None = None


def sweep_folder(sweep: SweepConfig, cells: Sequence[Cell]) -> Path:
    """The folder of a sweep: one per name, so that a second start goes on where the first ended."""
    return Path(cells[0].config.tracking.folder) / sweep.name


def run_sweep(path: Path, overrides: Sequence[str] = (), *, jobs: int | None = None) -> int:
    """Runs what is missing of a sweep, with a live table, and writes the comparison.

    Args:
      path: the sweep file.
      overrides: settings of the sweep file.
      jobs: cells at once; None is the file's, else one per GPU, without any one per core.

    Returns:
      0 where every cell is done, 1 where some failed, 130 after ctrl-C, 143 after SIGTERM.

    Raises:
      ConfigError: the file or a cell of it is wrong, or cells are there that were run with other settings.
    """
    sweep, cells = read_sweep(path, overrides)
    folder = sweep_folder(sweep, cells)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Bars(console) as bars:
        for config in {cell.config.student.model: cell.config for cell in cells}.values():
            embedded_models(config, bars)
    refuse_other_settings(cells, folder)
    if (few := too_few_seeds(cells)) is not None:
        console.print(few, style="yellow")
    tracking = cells[0].config.tracking
    with Tracker.open(
        uri=tracking.uri,
        experiment=tracking.experiment or sweep.name,
        run_name=sweep.name,
        folder=folder / "tracking",
        tags={**tracking.tags, "hybrid.kind": "parent", **note(tracking.note, sweep_note(path, sweep, cells))},
        runs_dir=Path(tracking.folder),
        run_id=saved(folder / "mlflow_run"),
    ) as parent:
        write_whole(folder / "mlflow_run", parent.run_id)
        write_whole(folder / "mlflow_uri", parent.uri)
        code = run_missing(path, overrides, cells, folder, console, jobs=jobs or sweep.jobs)
        if code == 0 and any(state_of(cell, folder).name == "done" for cell in cells):
            write_comparison(sweep, cells, folder, parent, console)
        elif code == 0:
            parent.close("FAILED")
        else:
            parent.close("KILLED")
    return code or tell_what_is_missing(cells, folder, console)


def tell_what_is_missing(cells: Sequence[Cell], folder: Path, console: Console) -> int:
    """Says which cells failed or were left behind by a worker that ended early; 1 where there are any, else 0."""
    failed = [cell for cell in cells if state_of(cell, folder).name == "failed"]
    left = [cell for cell in cells if state_of(cell, folder).name == "waiting"]
    if failed:
        where = folder / failed[0].name / FAILED_FILE
        console.print(f"{len(failed)} of {len(cells)} cells failed, the first: {where}", style="red", soft_wrap=True)
    if left:
        what = f"{len(left)} of {len(cells)} cells were not run, for a worker ended early; see {folder}/worker*.log"
        console.print(f"{what}; the same command goes on with them", style="red", soft_wrap=True)
    return int(bool(failed or left))


def embedded_models(config: ExperimentConfig, bars: Bars | None = None) -> list[str]:
    """The embedded models of an experiment by their folders' names, which tell their recipes; made where missing."""
    report = None if bars is None else bars.advance
    teachers = [] if config.teacher is None else teachers_of(config.teacher).values()
    names = [block.model for block in teachers if isinstance(block, LocalTeacherConfig)]
    folders = [model_folder(config.student.model, "student", report)] if config.student.model.startswith(TINY) else []
    folders += [model_folder(name, "teacher", report) for name in names if name.startswith(TINY)]
    return [Path(folder).name for folder in folders]


def made_of(config: ExperimentConfig) -> bytes:
    """Everything that a cell's numbers depend on, as JSON; where they are written to is left out."""
    settings = config.model_dump(mode="json", by_alias=True, exclude={"tracking"})
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2
    return orjson.dumps({"settings": settings, "embedded_models": embedded_models(config)}, option=options)


def refuse_other_settings(cells: Sequence[Cell], folder: Path) -> None:
    """Keeps cells of different settings out of one comparison.

    Raises:
      ConfigError: a cell in the folder was begun with other settings than the file now has.
    """
    for cell in cells:
        place = folder / cell.name
        if not (place / RESULT_FILE).is_file() and last_checkpoint(place) is None:
            continue
        before = orjson.loads((place / MADE_OF_FILE).read_bytes())
        now = orjson.loads(made_of(cell.config))
        if before != now:
            key, old, new = first_difference(before, now)
            raise ConfigError(
                f"{place} was run with {key} = {old}, and the sweep now has {new}; such cells cannot be compared: give "
                f"the sweep another name, take the change back, or remove the cell's folder"
            )


def first_difference(before: Any, now: Any, key: str = "") -> tuple[str, Any, Any]:
    """The first dotted key, in order, under which two JSON values differ, and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                return first_difference(before.get(name), now.get(name), f"{key}.{name}".removeprefix(".settings."))
    return key.removeprefix("."), before, now


def watch_workers(workers: Sequence[Worker], cells: Sequence[Cell], folder: Path, console: Console) -> None:
    """Shows what is done until every worker has ended."""
    with Live(table_of(cells, folder), console=console, refresh_per_second=1, transient=False) as live:
        while any(worker.poll() is None for worker in workers):
            time.sleep(LOOK_EVERY_S)
            live.update(table_of(cells, folder))
        live.update(table_of(cells, folder))


def run_missing(
    path: Path, overrides: Sequence[str], cells: Sequence[Cell], folder: Path, console: Console, *, jobs: int | None
) -> int:
    """Runs the cells that are not done; 130 after ctrl-C and 143 after SIGTERM, when no worker is left running."""
    for cell in cells:
        (folder / cell.name / FAILED_FILE).unlink(missing_ok=True)  # what failed before is tried again, by one worker
    missing = sum(state_of(cell, folder).name != "done" for cell in cells)
    try:
        with running_workers(path, overrides, folder, jobs=jobs, missing=missing) as workers:
            watch_workers(workers, cells, folder, console)
    except KeyboardInterrupt:
        code = EXIT_CODES[signal.SIGINT]
    except SystemExit as end:  # what the command line makes of SIGTERM
        code = int(end.code or 0)
    else:
        return 0
    console.print("stopped; the same command goes on with the cells that are missing")
    return code


def state_of(cell: Cell, folder: Path) -> State:
    """How far a cell is."""
    place = folder / cell.name
    if (place / RESULT_FILE).is_file():
        after = orjson.loads((place / RESULT_FILE).read_bytes())["after"]
        return State("done", next((value for name, value in after.items() if "avg_at" in name), None))
    if (place / FAILED_FILE).is_file():
        return State("failed")
    lock = FileLock(place / RUNNING)
    if not place.is_dir():
        return State("waiting")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return State("running")
    lock.release()
    return State("waiting")


def table_of(cells: Sequence[Cell], folder: Path) -> Table:
    """What is done, by task and method."""
    table = Table(title="cells")
    for name in ("task", "method", "done", "running", "failed", "held-out accuracy in %"):
        table.add_column(name, justify="left" if name in ("task", "method") else "right")
    for task, label in dict.fromkeys((cell.task, cell.label) for cell in cells):
        states = [state_of(cell, folder) for cell in cells if (cell.task, cell.label) == (task, label)]
        count = {name: sum(state.name == name for state in states) for name in ("done", "running", "failed")}
        reached = [state.accuracy for state in states if state.accuracy is not None]
        mean = f"{100 * sum(reached) / len(reached):.1f}" if reached else "-"
        row = [f"{count['done']}/{len(states)}", str(count["running"]), str(count["failed"]), mean]
        table.add_row(task, label, *row)
    return table


def work(path: Path, overrides: Sequence[str]) -> int:
    """One worker: takes the cells that nobody else has."""
    quiet()
    import torch

    torch.set_num_threads(1)
    sweep, cells = read_sweep(path, overrides)
    folder = sweep_folder(sweep, cells)
    with Stop(print) as stop:
        for _ in cells:  # each time from the first one: a worker may have left a cell meanwhile
            if stop.received is not None or not any(take(cell, folder, stop) for cell in cells):
                break
    return stop.exit_code


def take(cell: Cell, folder: Path, stop: Stop) -> bool:
    """Runs a cell unless it is done, has failed since the start, or somebody else has it; says whether it did."""
    place = folder / cell.name
    place.mkdir(parents=True, exist_ok=True)
    if is_over(place):
        return False
    try:
        with FileLock(place / OWNED, blocking=False), FileLock(place / RUNNING):  # this one others hold to look
            if is_over(place):
                return False
            run_cell(cell, folder, stop)
    except Timeout:
        return False
    return True


def is_over(place: Path) -> bool:
    """Whether a cell is done, or has failed since the sweep was started."""
    return (place / RESULT_FILE).is_file() or (place / FAILED_FILE).is_file()


def run_cell(cell: Cell, folder: Path, stop: Stop) -> None:
    """Trains one cell; a failure is written down beside it and does not stop the others."""
    place = folder / cell.name
    try:
        train_cell(cell, folder, stop)
    except FAILURES:
        write_whole(place / FAILED_FILE, traceback.format_exc())
        note_failure(cell, folder)


def note_failure(cell: Cell, folder: Path) -> None:
    """Gives a cell that failed before it had a run in MLflow a failed one, so that the comparison counts it."""
    place, tracking = folder / cell.name, cell.config.tracking
    if saved(place / "mlflow_run") is not None:
        return
    names = {"hybrid.method": cell.label, "hybrid.task": cell.task, "hybrid.seed": str(cell.seed)}
    names |= note(tracking.note, training_note(cell.config, next(iter(cell.config.methods)), cell.task, cell.label))
    tracker = Tracker.open(
        uri=(folder / "mlflow_uri").read_text(encoding="utf-8"),
        experiment=tracking.experiment or cell.config.name,
        run_name=" ".join(part for part in (cell.task, cell.label, f"seed {cell.seed}") if part),
        folder=place / "tracking",
        tags={**tracking.tags, "hybrid.kind": "training", **names},
        runs_dir=Path(tracking.folder),
        parent_run_id=saved(folder / "mlflow_run"),
    )
    write_whole(place / "mlflow_run", tracker.run_id)
    tracker.close("FAILED")


def train_cell(cell: Cell, folder: Path, stop: Stop) -> None:
    """Trains one cell in its folder, from its checkpoint where an earlier start left one."""
    config, place = cell.config, folder / cell.name
    student = model_folder(config.student.model, "student")
    write_whole(place / MADE_OF_FILE, made_of(config))
    prompts = training_prompts(config)
    with (
        Bars(Console()) as bars,
        teacher_of(config, folder=place, student=student, chat=is_chat(prompts)) as teacher,
    ):
        setting = Setting(
            config=config,
            folder=place,
            student=student,
            prompts=prompts,
            held_out=held_out_prompts(config),
            rewards=build_rewards(config.rewards) if config.rewards else [],
            teacher=teacher,
            uri=(folder / "mlflow_uri").read_text(encoding="utf-8"),
            parent_run_id=(folder / "mlflow_run").read_text(encoding="utf-8"),
            bars=bars,
            stop=stop,
        )
        own = Place(folder=place, label=cell.label, task=cell.task)
        train_method(setting, next(iter(config.methods)), resuming=True, place=own)


def write_comparison(
    sweep: SweepConfig, cells: Sequence[Cell], folder: Path, parent: Tracker, console: Console
) -> None:
    """Statistics, report and picture of a whole sweep."""
    from hybrid.comparison import compare_runs

    if not all_sent(folder, [cell.name for cell in cells], parent, console.print):
        return
    labels = list(dict.fromkeys(cell.label for cell in cells))
    baseline = sweep.baseline or next((label for label in labels if label == "grpo"), labels[0])
    experiment = cells[0].config.tracking.experiment or sweep.name
    paths = compare_runs(
        uri=parent.uri,
        experiment=experiment,
        parent_run_id=parent.run_id,
        baseline=baseline,
        target=sweep.target,
        folder=folder,
        title=sweep.name,
        console=console,
    )
    for path in paths:
        parent.artifact_file(path)


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), sys.argv[2:]))
