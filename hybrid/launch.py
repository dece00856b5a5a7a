"""Runs an experiment: every method of the file from the same start, tracked, evaluated and compared."""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import datetime
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from rich.console import Console

from hybrid.checkpoints import disk_told
from hybrid.config import TINY, ExperimentConfig, resolved_yaml
from hybrid.data import has_answers
from hybrid.engine import ONE_NODE, Nodes, join, launch, needs_launch, needs_vllm, this_rank
from hybrid.errors import ConfigError, DataError
from hybrid.in_use import alone_in
from hybrid.plan import plan_lines
from hybrid.preflights import preflight_lines
from hybrid.progress import Bars
from hybrid.rewards import RewardFunction, build_rewards
from hybrid.run_notes import experiment_note, note
from hybrid.silent import Silent
from hybrid.sources import held_out_prompts, model_folder, shared_prompts, training_prompts, whole_model
from hybrid.stopping import Stop
from hybrid.summary_table import print_outcomes
from hybrid.teacher_config import LocalTeacherConfig, teachers_of
from hybrid.teaching import Making, is_chat, start_for_all, teacher_of
from hybrid.together import from_main, loss_told
from hybrid.tracking import Tracker, replay
from hybrid.training import Setting, saved, train_method
from hybrid.whole_file import write_whole


def train_experiment(
    config: ExperimentConfig,
    *,
    source: Path,
    resume: str | None = None,
    from_best: bool = False,
    overrides: Sequence[str] = (),
    nodes: Nodes = ONE_NODE,
) -> int:
    """Trains every method of an experiment and compares them, in this process or in as many as the engine wants.

    Args:
      config: the experiment, checked.
      source: its file, for messages and for the processes that are started.
      resume: "latest", or the folder of an earlier start of the same experiment.
      from_best: go back to the best checkpoint of each training that is not done, in place of its newest; without
        `resume`, of the latest start.
      overrides: settings that were given beside the file, for the processes that are started.
      nodes: the machines of the run.

    Returns:
      The exit code: 0, 130 after ctrl-C, 143 after SIGTERM.

    Raises:
      HybridError, TeacherError: what the experiment needs is missing or wrong; the message says what to do.
    """
    quiet()
    needs_vllm(config)
    resume = "latest" if from_best and resume is None else resume
    if needs_launch(config.engine):
        return start_processes(config, source, resume, overrides, nodes, from_best=from_best)
    join(config.engine)
    if config.student.model.startswith(TINY):
        torch.set_num_threads(1)  # tiny matrices: more threads cost more than they bring
    is_main = this_rank().is_main
    console = Console(quiet=not is_main)
    folder = from_main(lambda: run_folder(config, resume))
    alone = alone_in(folder) if is_main else nullcontext()
    with Bars(console) as bars, Stop(bars.say) as stop, disk_told(folder), loss_told(), alone:
        bars.say(f"[bold]{config.name}[/bold]  {source}  ->  {folder}")
        student = whole_model(model_folder(config.student.model, "student", bars.advance))
        for line in plan_lines(config) if this_rank().world == 1 else []:
            console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        prompts, held_out = training_prompts(config), held_out_prompts(config)
        if held_out is not None and (shared := shared_prompts(prompts, held_out)) is not None:
            console.print(shared, style="yellow", highlight=False, markup=False, soft_wrap=True)
        rewards = build_rewards(config.rewards) if config.rewards else []
        refuse_poor_data(config, prompts, held_out, rewards)
        if is_main:
            (folder / "experiment.yaml").write_text(resolved_yaml(config), encoding="utf-8")
        with (
            teacher_of(config, folder=folder, student=student, chat=is_chat(prompts), progress=bars.advance) as teacher,
            open_parent(config, folder) as parent,
        ):
            for line in from_main(lambda: preflight_lines(config, teacher, prompts, student)):
                console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
            setting = Setting(
                config=config,
                folder=folder,
                student=student,
                prompts=prompts,
                held_out=held_out,
                rewards=rewards,
                teacher=teacher,
                uri=parent.uri,
                parent_run_id=parent.run_id,
                bars=bars,
                stop=stop,
            )  # fmt: skip
            outcomes = []
            for label in config.methods:
                outcomes.append(train_method(setting, label, resuming=resume is not None, from_best=from_best))
                if stop.agreed():
                    break
            report = None
            if is_main and stop.received is None and all_sent(folder, list(config.methods), parent, bars.say):
                report = write_comparison(config, folder, parent) if held_out is not None else None
    print_outcomes(console, outcomes, report)
    console.print(closing(config, source, folder, stop), highlight=False, soft_wrap=True)
    return stop.exit_code


def refuse_poor_data(
    config: ExperimentConfig, prompts: Dataset, held_out: Dataset | None, rewards: Sequence[RewardFunction]
) -> None:
    """Refuses prompts that would stop the training at some step, or that make none.

    Raises:
      DataError: too few prompts for a step, or a row without what a reward reads.
    """
    wanted = config.train.prompts_per_step
    if len(prompts) < wanted:
        raise DataError(f"train.prompts_per_step: a step takes {wanted} prompts; the data has {len(prompts)}")
    for where, rows in (("data.source: ", prompts), ("evaluate.data: ", held_out)):
        if rows is not None:
            columns = [(column, f"the reward {one.__name__}") for one in rewards for column in one.columns]
            has_answers(rows, columns, where)


def start_processes(
    config: ExperimentConfig,
    source: Path,
    resume: str | None,
    overrides: Sequence[str],
    nodes: Nodes,
    *,
    from_best: bool = False,
) -> int:
    """Makes what all processes share, and runs this command once per process."""
    console = Console()
    with Bars(console) as bars:
        embedded = [config.student.model] if config.student.model.startswith(TINY) else []
        for name in embedded:
            model_folder(name, "student", bars.advance)
        for block in [] if config.teacher is None else teachers_of(config.teacher).values():
            if isinstance(block, LocalTeacherConfig) and block.model.startswith(TINY):
                model_folder(block.model, "teacher", bars.advance)
    for line in plan_lines(config, nodes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    folder = Path(config.tracking.folder) / config.name
    command = ["-m", "hybrid.cli", "train", str(source)]
    command += [part for setting in overrides for part in ("--set", setting)]
    command += [] if resume is None else ["--resume", resume]
    command += ["--from-best"] if from_best else []
    with ExitStack() as stack:
        student = model_folder(config.student.model, "student")
        start_for_all(config, Making.of(config, stack, folder=folder, student=student))
        return launch(config.engine, command, nodes)


def quiet() -> None:
    """No telemetry, no second progress bar, no advice of libraries between our lines."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed tells every process what it found
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed calls old names
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def run_folder(config: ExperimentConfig, resume: str | None) -> Path:
    """The folder of this start: a new one named by the time, or the one to go on with.

    Raises:
      ConfigError: there is nothing to resume.
      DataError: the folder cannot be written.
    """
    root = Path(config.tracking.folder) / config.name
    if resume == "latest":
        starts = sorted(p for p in root.glob("*") if (p / "experiment.yaml").is_file())
        if not starts:
            raise ConfigError(
                f"there is no earlier start of {config.name} in {root}; run without --resume or --from-best"
            )
        return starts[-1]
    if resume is not None:
        if not (Path(resume) / "experiment.yaml").is_file():
            raise ConfigError(f"{resume} is no folder of an earlier start (it has no experiment.yaml)")
        return Path(resume)
    folder = root / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        folder = Path(f"{folder}-{os.getpid()}")
        folder.mkdir()
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}); set tracking.folder to one that can") from error
    return folder


def open_parent(config: ExperimentConfig, folder: Path) -> Tracker | Silent:
    """The MLflow run that the trainings stand under; rank 0 alone writes to it."""
    if not this_rank().is_main:
        return Silent()
    tracking = config.tracking
    tags = {**tracking.tags, "hybrid.kind": "parent", **note(tracking.note, experiment_note(config))}
    tracker = Tracker.open(
        uri=tracking.uri,
        experiment=tracking.experiment or config.name,
        run_name=f"{config.name} {folder.name}",
        folder=folder / "tracking",
        tags=tags,
        runs_dir=Path(tracking.folder),
        run_id=saved(folder / "mlflow_run"),
    )
    write_whole(folder / "mlflow_run", tracker.run_id)
    return tracker


def all_sent(folder: Path, names: Sequence[str], parent: Tracker | Silent, tell: Callable[[str], None]) -> bool:
    """Whether the tracking has everything; what a lost store could not take, of whichever start, is sent now.

    Args:
      folder: of the run.
      names: of the trainings' folders in it.
      parent: their parent's tracker.
      tell: told where something waits.
    """
    waiting = sum(replay(folder / name / "tracking") for name in names)
    if not waiting and parent.flush():
        return True
    tell(
        "the MLflow store does not take its records, which wait on disk; once it does, --resume sends them and writes "
        "the report"
    )
    return False


def write_comparison(config: ExperimentConfig, folder: Path, parent: Tracker | Silent) -> Path:
    """The HTML report of this start's trainings and a picture of their curves, also artifacts of the parent run."""
    from hybrid.compare.load import load_runs
    from hybrid.compare.plots import learning_curves_png
    from hybrid.compare.report import write_report

    experiment = config.tracking.experiment or config.name
    runs = load_runs(uri=parent.uri, experiment=experiment, parent_run_id=parent.run_id)
    labels = list(config.methods)
    baseline = next((label for label in labels if label == "grpo"), labels[-1])
    path = write_report(runs, folder / "report.html", title=config.name, baseline=baseline)
    picture = learning_curves_png(runs, folder / "learning_curves.png", baseline=baseline)
    for file in (path, picture):
        parent.artifact_file(file)
    return path


def closing(config: ExperimentConfig, source: Path, folder: Path, stop: Stop) -> str:
    """The last line: how to look at the runs, or how to go on."""
    if stop.received is not None:
        return f"stopped with a checkpoint; go on with: hybrid train {source} --resume {folder}"
    where = f" --uri {config.tracking.uri}" if config.tracking.uri else f" --folder {config.tracking.folder}"
    return f"MLflow: hybrid ui{where}"
