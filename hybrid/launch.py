"""Runs an experiment: every method of the file from the same start, tracked, evaluated and compared."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
from datasets import Dataset
from rich.console import Console

from hybrid.config import TINY, ExperimentConfig, resolved_yaml
from hybrid.engine import ONE_NODE, Nodes, join, launch, needs_launch, this_rank
from hybrid.errors import ConfigError, DataError
from hybrid.evaluate import Evaluation, Sampling, evaluate, read_evaluation, write_evaluation
from hybrid.methods import MethodConfig
from hybrid.pictures import tokenizer_of
from hybrid.progress import Bars
from hybrid.rewards import build_rewards
from hybrid.silent import Silent
from hybrid.sources import held_out_prompts, model_folder, training_prompts
from hybrid.stopping import Stop
from hybrid.summary_table import Outcome, print_evaluation, print_outcomes
from hybrid.teacher_config import LocalTeacherConfig, teachers_of
from hybrid.teaching import teacher_of
from hybrid.together import from_main, wait_for_all
from hybrid.tracking import Tracker
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.training_args import training_args
from hybrid.watching import Recorder, Watch
from teachers.processors import load_processor, reads_images

RESULT_FILE = "result.json"
"""Marks a training of an experiment as done; a resumed experiment passes it over."""

START = ""
"""Label of the evaluation before any training."""

START_FILE = "start.json"
"""Holds that evaluation, for a run that is resumed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the trainings of one experiment share."""

    config: ExperimentConfig
    folder: Path
    student: str
    prompts: Dataset
    held_out: Dataset | None
    rewards: Sequence[Any]
    teacher: Any
    uri: str
    parent_run_id: str
    bars: Bars
    stop: Stop
    evaluations: dict[str, Evaluation] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a training writes, and how it is called.

    Attributes:
      folder: of the training.
      label: tag `hybrid.method`.
      task: tag `hybrid.task`.
    """

    folder: Path
    label: str
    task: str


def train_experiment(
    config: ExperimentConfig,
    *,
    source: Path,
    resume: str | None = None,
    overrides: Sequence[str] = (),
    nodes: Nodes = ONE_NODE,
) -> int:
    """Trains every method of an experiment and compares them, in this process or in as many as the engine wants.

    Args:
      config: the experiment, checked.
      source: its file, for messages and for the processes that are started.
      resume: "latest", or the folder of an earlier start of the same experiment.
      overrides: settings that were given beside the file, for the processes that are started.
      nodes: the machines of the run.

    Returns:
      The exit code: 0, 130 after ctrl-C, 143 after SIGTERM.

    Raises:
      HybridError, TeacherError: what the experiment needs is missing or wrong; the message says what to do.
    """
    quiet()
    if needs_launch(config.engine):
        return start_processes(config, source, resume, overrides, nodes)
    join(config.engine)
    if config.student.model.startswith(TINY):
        torch.set_num_threads(1)  # tiny matrices: more threads cost more than they bring
    is_main = this_rank().is_main
    console = Console(quiet=not is_main)
    folder = from_main(lambda: run_folder(config, resume))
    with Bars(console) as bars, Stop(bars.say) as stop:
        bars.say(f"[bold]{config.name}[/bold]  {source}  ->  {folder}")
        student = model_folder(config.student.model, "student", bars.advance)
        prompts, held_out = training_prompts(config), held_out_prompts(config)
        rewards = build_rewards(config.rewards) if config.rewards else []
        if is_main:
            (folder / "experiment.yaml").write_text(resolved_yaml(config), encoding="utf-8")
        with (
            teacher_of(
                config.teacher,
                temperature=config.train.temperature,
                folder=folder,
                student=student,
                progress=bars.advance,
            ) as teacher,
            open_parent(config, folder) as parent,
        ):
            if is_main:
                (folder / "mlflow_run").write_text(parent.run_id, encoding="utf-8")
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
                outcomes.append(train_method(setting, label, resuming=resume is not None))
                if stop.agreed():
                    break
            report = None
            if is_main and stop.received is None and held_out is not None:
                report = write_comparison(config, folder, parent)
    print_outcomes(console, outcomes, report)
    console.print(closing(config, source, folder, stop), highlight=False)
    return stop.exit_code


def start_processes(
    config: ExperimentConfig, source: Path, resume: str | None, overrides: Sequence[str], nodes: Nodes
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
    command = ["-m", "hybrid.cli", "train", str(source)]
    command += [part for setting in overrides for part in ("--set", setting)]
    command += [] if resume is None else ["--resume", resume]
    return launch(config.engine, command, nodes)


def cut_records(path: Path, checkpoint: str | None) -> None:
    """Takes out of a rollouts' file the steps that are done again, so that no step stands in it twice.

    Args:
      path: the file; may be missing.
      checkpoint: folder named after its step; None is a start from the beginning.
    """
    if not path.is_file():
        return
    first = int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if is_before(line, first)]
    beside = path.with_suffix(".cut")
    beside.write_bytes(b"".join(kept))
    beside.replace(path)


def is_before(line: bytes, step: int) -> bool:
    """Whether a record line is whole and of an earlier step; a line that a kill has torn is not."""
    try:
        return orjson.loads(line)["step"] < step
    except orjson.JSONDecodeError:
        return False


def evaluate_experiment(config: ExperimentConfig, *, source: Path, checkpoint: str | None = None) -> int:
    """Measures a student of an experiment on its held-out prompts, and notes the result in MLflow and in a file.

    Args:
      config: the experiment, checked.
      source: its file, for messages.
      checkpoint: folder of a model; None is the student before its training.

    Returns:
      The exit code 0.

    Raises:
      ConfigError: the experiment evaluates nothing.
      DataError: there is no model.
    """
    quiet()
    console = Console()
    held_out = held_out_prompts(config)
    if held_out is None:
        raise ConfigError(f"{source}: evaluate is null, so there is nothing to measure; write evaluate: {{}}")
    folder = run_folder(config, None)
    with Bars(console) as bars, Stop(bars.say) as stop, open_parent(config, folder) as parent:
        parent.tags({"hybrid.kind": "evaluation", "hybrid.model": checkpoint or config.student.model})
        student = checkpoint or model_folder(config.student.model, "student", bars.advance)
        setting = Setting(
            config=config,
            folder=folder,
            student=student,
            prompts=held_out,
            held_out=held_out,
            rewards=build_rewards(config.rewards),
            teacher=None,
            uri=parent.uri,
            parent_run_id=parent.run_id,
            bars=bars,
            stop=stop,
        )
        found = run_evaluation(setting, *load_student(config, student))
        result = {
            "model": student,
            "sampling": found.sampling.__dict__,
            **found.metrics(),
            "intervals": found.intervals(),
        }
        (folder / "evaluation.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        parent.metrics(found.metrics(), 0)
        parent.artifact_file(folder / "evaluation.json")
    print_evaluation(console, found, student)
    console.print(f"written: {folder / 'evaluation.json'}", highlight=False)
    return 0


def quiet() -> None:
    """No telemetry, no second progress bar, no advice of libraries between our lines."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
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
            raise ConfigError(f"there is no earlier start of {config.name} in {root}; run without --resume")
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
    tags = {**tracking.tags, "hybrid.kind": "parent"}
    if tracking.note:
        tags["mlflow.note.content"] = tracking.note
    return Tracker.open(
        uri=tracking.uri,
        experiment=tracking.experiment or config.name,
        run_name=f"{config.name} {folder.name}",
        folder=folder / "tracking",
        tags=tags,
        runs_dir=Path(tracking.folder),
        run_id=saved(folder / "mlflow_run"),
    )


def saved(path: Path) -> str | None:
    """A run's identifier written by an earlier start; None where there is none."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def open_child(setting: Setting, label: str, place: Place) -> Tracker | Silent:
    """The MLflow run of one training: a new one, or the one that is gone on with; rank 0 alone writes to it."""
    if not this_rank().is_main:
        return Silent()
    config = setting.config
    folder = place.folder
    tags = {**config.tracking.tags, "hybrid.kind": "training", "hybrid.method": place.label, "hybrid.task": place.task}
    tags["hybrid.seed"] = str(config.seed)
    tracker = Tracker.open(
        uri=setting.uri,
        experiment=config.tracking.experiment or config.name,
        run_name=" ".join(part for part in (place.task, place.label, f"seed {config.seed}") if part),
        folder=folder / "tracking",
        tags=tags,
        runs_dir=Path(config.tracking.folder),
        parent_run_id=setting.parent_run_id,
        run_id=saved(folder / "mlflow_run"),
    )
    (folder / "mlflow_run").write_text(tracker.run_id, encoding="utf-8")
    own = config.for_method(label)
    tracker.params(own.model_dump(mode="json", by_alias=True, exclude={"tracking", "compare"}))
    tracker.artifact_text("experiment.yaml", resolved_yaml(own))
    tracker.environment()
    return tracker


def task_name(config: ExperimentConfig) -> str:
    """A short name of the prompts: the word after `tiny:`, the reasoning-gym task, or the source."""
    source = config.data.source
    return source.removeprefix(TINY) if isinstance(source, str) else source.task


def train_method(setting: Setting, label: str, *, resuming: bool, place: Place | None = None) -> Outcome:
    """Trains the student by one method, from the start or from its last checkpoint.

    Args:
      setting: what the trainings share.
      label: of the method in the experiment.
      resuming: go on from the last checkpoint, where there is one.
      place: where it writes; None is a folder of the method's label in the setting's.
    """
    config, method = setting.config.for_method(label), setting.config.methods[label]
    place = place or Place(folder=setting.folder / label, label=label, task=task_name(config))
    folder = place.folder
    folder.mkdir(parents=True, exist_ok=True)
    if (done := folder / RESULT_FILE).is_file():
        return Outcome(**orjson.loads(done.read_bytes()))
    with open_child(setting, label, place) as tracker:
        # before any model is read: ZeRO-3 spreads its weights while they are
        args = training_args(config, method, folder, reward_weights=[reward.weight for reward in setting.rewards])
        model, tokenizer = load_student(config, setting.student)
        trainer = build_trainer(setting, config, method, model, tokenizer, args, folder, tracker)
        watch = Watch(
            tracker=tracker,
            bars=setting.bars,
            label=place.label,
            responses_per_step=config.train.prompts_per_step * config.train.generations,
            evaluate=evaluator(setting, label, trainer, tokenizer),
            every=config.evaluate.every if config.evaluate else 0,
            before=lambda: start_accuracy(setting, trainer, tokenizer),
        )
        trainer.add_callback(watch)
        began = time.perf_counter()
        checkpoint = from_main(lambda: last_checkpoint(folder)) if resuming else None
        if resuming and this_rank().is_main:
            cut_records(folder / "rollouts.jsonl", checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - began
        if setting.stop.agreed():
            tracker.close("KILLED")
            return outcome_of(setting, label, trainer.state.global_step, seconds)
        watch.measure(trainer.state.global_step)
        trainer.save_model(str(folder / "model"))
        outcome = outcome_of(setting, label, trainer.state.global_step, seconds)
        if this_rank().is_main:
            tokenizer.save_pretrained(str(folder / "model"))
            if config.tracking.record_rollouts:
                tracker.artifact_file(folder / "rollouts.jsonl")
            done.write_bytes(orjson.dumps(outcome.__dict__))
    wait_for_all()
    return outcome


def outcome_of(setting: Setting, label: str, steps: int, seconds: float) -> Outcome:
    """What a training came to: its start and its last evaluation."""
    before, after = setting.evaluations.get(START), setting.evaluations.get(label)
    return Outcome(
        method=label,
        steps=steps,
        seconds=seconds,
        before=before.metrics() if before else {},
        after=after.metrics() if after else {},
        intervals_before=before.intervals() if before else {},
        intervals_after=after.intervals() if after else {},
    )


def build_trainer(
    setting: Setting, config: ExperimentConfig, method: MethodConfig, model: Any, tokenizer: Any, args: HybridConfig,
    folder: Path, tracker: Tracker | Silent,
) -> HybridTrainer:  # fmt: skip
    """The trainer of one method with everything that watches it."""
    path = folder / "rollouts.jsonl" if config.tracking.record_rollouts else None
    recorder = Recorder(
        path=path,
        tracker=tracker,
        tokenizer=tokenizer,
        table_every=config.tracking.completions_every,
        tell=setting.bars.say,
    )
    lora = config.student.lora
    peft = None
    if lora is not None:
        from peft import LoraConfig

        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        peft = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=lora.dropout,
            target_modules=targets,
        )
    trainer = HybridTrainer(
        model,
        method=method,
        teacher=setting.teacher,
        reward_funcs=list(setting.rewards) or None,
        args=args,
        train_dataset=setting.prompts,
        processing_class=tokenizer,
        peft_config=peft,
        callbacks=[setting.stop],
        watch=recorder,
        progress=setting.bars.advance_part,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def load_student(config: ExperimentConfig, folder: str) -> tuple[Any, Any]:
    """The student's weights and its tokenizer or processor, the same for every method of an experiment.

    Raises:
      DataError: there is no model.
    """
    transformers.set_seed(config.seed)
    try:
        has_images = reads_images(folder)
        load = load_processor if has_images else transformers.AutoTokenizer.from_pretrained
        processing_class = load(folder, padding_side="left")
        dtype = config.student.dtype if config.student.dtype == "auto" else getattr(torch, config.student.dtype)
        family = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
        model = family.from_pretrained(folder, dtype=dtype)
    except OSError as error:
        raise DataError(f"student.model: no model could be loaded from {folder!r}: {error}") from error
    tokenizer = tokenizer_of(processing_class)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.engine.kind != "deepspeed":  # which puts the weights where it wants them
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return model, processing_class


def evaluator(setting: Setting, label: str, trainer: HybridTrainer, tokenizer: Any) -> Any:
    """A function that measures the present student on the held-out prompts; None where there are none."""
    if setting.held_out is None or setting.config.evaluate is None:
        return None

    def measure() -> Mapping[str, float]:
        with trainer.generating() as model:
            setting.evaluations[label] = run_evaluation(setting, model, tokenizer)
        return setting.evaluations[label].metrics()

    return measure


def run_evaluation(setting: Setting, model: Any, tokenizer: Any) -> Evaluation:
    """One evaluation with its bar."""
    config, wanted = setting.config, setting.config.evaluate
    assert wanted is not None
    assert setting.held_out is not None
    sampling = Sampling(
        samples=wanted.samples,
        max_completion_length=wanted.max_completion_length or config.train.max_completion_length,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        batch_size=wanted.batch_size,
        seed=config.seed,
        success_at=wanted.success_at,
    )
    return evaluate(
        model,
        tokenizer,
        setting.held_out,
        setting.rewards,
        sampling,
        chat_template_kwargs=config.student.chat_template_kwargs,
        report=setting.bars.part("evaluation"),
    )


def start_accuracy(setting: Setting, trainer: HybridTrainer, tokenizer: Any) -> Mapping[str, float]:
    """Held-out metrics of the start, measured once: every method has the same, and a resumed run finds them again."""
    if setting.held_out is None:
        return {}
    path = setting.folder / START_FILE
    if START not in setting.evaluations and (kept := from_main(lambda: read_evaluation(path))) is not None:
        setting.evaluations[START] = kept
    if START not in setting.evaluations and trainer.state.global_step == 0:
        evaluator(setting, START, trainer, tokenizer)()
        if this_rank().is_main:
            write_evaluation(path, setting.evaluations[START])
    return setting.evaluations[START].metrics() if START in setting.evaluations else {}


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of a training; None for a start from the beginning."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    return str(found[-1]) if found else None


def write_comparison(config: ExperimentConfig, folder: Path, parent: Tracker) -> Path:
    """The HTML report of this start's trainings, also an artifact of the parent run."""
    from hybrid.compare.load import load_runs
    from hybrid.compare.report import write_report

    experiment = config.tracking.experiment or config.name
    runs = load_runs(uri=parent.uri, experiment=experiment, parent_run_id=parent.run_id)
    labels = list(config.methods)
    baseline = next((label for label in labels if label == "grpo"), labels[-1])
    path = write_report(runs, folder / "report.html", title=config.name, baseline=baseline)
    parent.artifact_file(path)
    return path


def closing(config: ExperimentConfig, source: Path, folder: Path, stop: Stop) -> str:
    """The last line: how to look at the runs, or how to go on."""
    if stop.received is not None:
        return f"stopped with a checkpoint; go on with: hybrid train {source} --resume {folder}"
    where = f" --uri {config.tracking.uri}" if config.tracking.uri else f" --folder {config.tracking.folder}"
    return f"MLflow: hybrid ui{where}"
