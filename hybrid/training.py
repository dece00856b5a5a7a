"""One training of an experiment: a student, a method, everything that watches them, and the evaluations."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
from datasets import Dataset

from hybrid.checkpoints import checkpoints, go_back_to_best, newest_good, step_of
from hybrid.config import TINY, ExperimentConfig, resolved_yaml
from hybrid.engine import this_rank
from hybrid.errors import DataError
from hybrid.evaluate import Evaluation, Sampling, evaluate, read_evaluation, write_evaluation
from hybrid.methods import MethodConfig
from hybrid.phases import Tell
from hybrid.pictures import tokenizer_of
from hybrid.plan import who_does
from hybrid.progress import Bars
from hybrid.run_notes import note, training_note
from hybrid.silent import Silent
from hybrid.stopping import Stop
from hybrid.summary_table import Outcome
from hybrid.together import from_main, wait_for_all
from hybrid.tracking import Tracker, replay
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.training_args import training_args
from hybrid.watchdog import LAST_WORDS_S, Watchdog
from hybrid.watching import Recorder, Watch
from hybrid.whole_file import write_whole
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


def saved(path: Path) -> str | None:
    """A run's identifier written by an earlier start; None where there is none."""
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


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


def open_child(setting: Setting, label: str, place: Place, *, branch_at: int | None = None) -> Tracker | Silent:
    """The MLflow run of one training: a new one, or the one that is gone on with; rank 0 alone writes to it.

    Args:
      setting: what the trainings share.
      label: of the method in the experiment.
      place: where it writes.
      branch_at: begin a new run with what the earlier one measured up to this step; the earlier one stays as it is.
    """
    if not this_rank().is_main:
        return Silent()
    config = setting.config
    folder = place.folder
    tags = {**config.tracking.tags, "hybrid.kind": "training", "hybrid.method": place.label, "hybrid.task": place.task}
    described = training_note(config, label, place.task, place.label)
    tags |= {"hybrid.seed": str(config.seed), **note(config.tracking.note, described)}
    earlier = saved(folder / "mlflow_run")
    if branch_at is not None and earlier is not None:
        replay(folder / "tracking")  # what the earlier run could not send: its points are copied, its file used anew
        tags |= {"hybrid.from_run": earlier, "hybrid.from_step": str(branch_at)}
    tracker = Tracker.open(
        uri=setting.uri,
        experiment=config.tracking.experiment or config.name,
        run_name=" ".join(part for part in (place.task, place.label, f"seed {config.seed}") if part),
        folder=folder / "tracking",
        tags=tags,
        runs_dir=Path(config.tracking.folder),
        parent_run_id=setting.parent_run_id,
        run_id=earlier if branch_at is None else None,
    )
    if branch_at is not None and earlier is not None:
        tracker.history(earlier, branch_at)
    write_whole(folder / "mlflow_run", tracker.run_id)
    own = config.for_method(label)
    tracker.params(own.model_dump(mode="json", by_alias=True, exclude={"tracking", "compare"}))
    tracker.artifact_text("experiment.yaml", resolved_yaml(own))
    tracker.environment()
    return tracker


def task_name(config: ExperimentConfig) -> str:
    """A short name of the prompts: the word after `tiny:`, the reasoning-gym task, or the source."""
    source = config.data.source
    return source.removeprefix(TINY) if isinstance(source, str) else source.task


def train_method(
    setting: Setting, label: str, *, resuming: bool, from_best: bool = False, place: Place | None = None
) -> Outcome:
    """Trains the student by one method, from the start or from its last checkpoint.

    Args:
      setting: what the trainings share.
      label: of the method in the experiment.
      resuming: go on from the last checkpoint, where there is one.
      from_best: go back to the best checkpoint in place of the last.
      place: where it writes; None is a folder of the method's label in the setting's.
    """
    config, method = setting.config.for_method(label), setting.config.methods[label]
    place = place or Place(folder=setting.folder / label, label=label, task=task_name(config))
    folder = place.folder
    folder.mkdir(parents=True, exist_ok=True)
    if (done := folder / RESULT_FILE).is_file():
        return Outcome(**orjson.loads(done.read_bytes()))
    checkpoint = from_main(lambda: resume_point(folder, setting.bars.say, best=from_best)) if resuming else None
    branch_at = step_of(Path(checkpoint)) if checkpoint and from_best else None
    with open_child(setting, label, place, branch_at=branch_at) as tracker:
        # before any model is read: ZeRO-3 spreads its weights while they are
        weights = [reward.weight for reward in training_rewards(method, setting.rewards)]
        args = training_args(config, method, folder, reward_weights=weights)
        model, tokenizer = load_student(config, setting.student)
        dog = Watchdog(
            folder,
            limit_s=config.engine.stall_after_s,
            explain=who_does(config),
            last_words=lambda text: end_run(tracker, text),
        )
        trainer = build_trainer(setting, config, method, model, tokenizer, args, folder, tracker, dog)
        watch = Watch(
            tracker=tracker,
            bars=setting.bars,
            label=place.label,
            responses_per_step=config.train.prompts_per_step * config.train.generations,
            evaluate=evaluator(setting, label, trainer, tokenizer, dog.note),
            every=config.evaluate.every if config.evaluate else 0,
            folder=folder,
            before=lambda: start_accuracy(setting, trainer, tokenizer, dog.note),
        )
        trainer.add_callback(watch)
        began = time.perf_counter()
        if resuming and this_rank().is_main:
            cut_records(folder / "rollouts.jsonl", checkpoint)
        with dog:
            trainer.train(resume_from_checkpoint=checkpoint)
            seconds = time.perf_counter() - began
            if setting.stop.agreed():
                tracker.close("KILLED")
                return outcome_of(setting, label, trainer.state.global_step, seconds)
            watch.measure(trainer.state.global_step)
            dog.note("saving the model")
            trainer.save_model(str(folder / "model"))
        outcome = outcome_of(setting, label, trainer.state.global_step, seconds)
        if this_rank().is_main:
            tokenizer.save_pretrained(str(folder / "model"))
            if config.tracking.record_rollouts:
                tracker.artifact_file(folder / "rollouts.jsonl")
    if this_rank().is_main:  # after its run is closed: a kill in between has the end come again, and no run left open
        write_whole(done, orjson.dumps(outcome.__dict__))
    wait_for_all()
    return outcome


def end_run(tracker: Tracker | Silent, text: str) -> None:
    """Notes in MLflow why a run was ended."""
    tracker.tags({"hybrid.stalled": text})
    tracker.close("FAILED", timeout_s=LAST_WORDS_S / 2)  # time is left to write down what the store did not take


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
    folder: Path, tracker: Tracker | Silent, dog: Watchdog,
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

    def progress(part: str, done: int, total: int) -> None:
        dog.note(part, done, total)
        setting.bars.advance_part(part, done, total)

    trainer = HybridTrainer(
        model,
        method=method,
        teacher=setting.teacher,
        reward_funcs=training_rewards(method, setting.rewards) or None,
        args=args,
        train_dataset=setting.prompts,
        processing_class=tokenizer,
        peft_config=peft,
        callbacks=[dog, setting.stop],
        watch=recorder,
        contexts={str(name): words for name, words in config.student.contexts.items()},
        progress=progress,
        say=setting.bars.say,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def training_rewards(method: MethodConfig, rewards: Sequence[Any]) -> list[Any]:
    """The rewards that judge a training's responses; none where they end early by request (KAT with `online: true`)."""
    return [] if method.online_stop is not None and method.online_stop.required else list(rewards)


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
    except (OSError, ValueError) as error:
        raise DataError(f"student.model: no model could be loaded from {folder!r}: {error}") from error
    tokenizer = tokenizer_of(processing_class)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.engine.kind != "deepspeed":  # which puts the weights where it wants them
        model.to("cuda" if torch.cuda.is_available() else "cpu")  # pyright: ignore
    return model, processing_class


def evaluator(setting: Setting, label: str, trainer: HybridTrainer, tokenizer: Any, tell: Tell) -> Any:
    """A function that measures the present student on the held-out prompts; None where there are none."""
    if setting.held_out is None or setting.config.evaluate is None:
        return None

    def measure() -> Mapping[str, float]:
        with trainer.generating() as model:
            setting.evaluations[label] = run_evaluation(setting, model, tokenizer, tell)
        return setting.evaluations[label].metrics()

    return measure


def sampling_of(config: ExperimentConfig) -> Sampling:
    """How the held-out responses of an experiment are drawn."""
    wanted = config.evaluate
    assert wanted is not None
    return Sampling(
        samples=wanted.samples,
        max_completion_length=wanted.max_completion_length or config.train.max_completion_length,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        batch_size=wanted.batch_size,
        seed=config.seed,
        success_at=wanted.success_at,
    )


def run_evaluation(setting: Setting, model: Any, tokenizer: Any, tell: Tell | None = None) -> Evaluation:
    """One evaluation with its bar; `tell` is told how far it is too."""
    config = setting.config
    assert setting.held_out is not None
    show = setting.bars.part("evaluation")

    def report(done: int, total: int) -> None:
        show(done, total)
        if tell is not None:
            tell("evaluation", done, total)

    return evaluate(
        model,
        tokenizer,
        setting.held_out,
        setting.rewards,
        sampling_of(config),
        chat_template_kwargs=config.student.chat_template_kwargs,
        report=report,
    )


def start_accuracy(setting: Setting, trainer: HybridTrainer, tokenizer: Any, tell: Tell) -> Mapping[str, float]:
    """Held-out metrics of the start, measured once: every method has the same, and a resumed run finds them again."""
    if setting.held_out is None:
        return {}
    path = setting.folder / START_FILE
    if START not in setting.evaluations and (kept := from_main(lambda: read_evaluation(path))) is not None:
        setting.evaluations[START] = kept
    if START not in setting.evaluations and trainer.state.global_step == 0:
        evaluator(setting, START, trainer, tokenizer, tell)()
        if this_rank().is_main:
            write_evaluation(path, setting.evaluations[START])
    return setting.evaluations[START].metrics() if START in setting.evaluations else {}


def resume_point(folder: Path, tell: Callable[[str], None], *, best: bool) -> str | None:
    """The checkpoint that a training goes on from: its newest good one, or its best, with the later ones removed.

    Raises:
      DataError: the best one is asked for, and there are only others.
    """
    if not best or not checkpoints(folder):
        return last_checkpoint(folder, tell)
    found = go_back_to_best(folder)
    tell(f"{folder.name}: back to its best checkpoint, {found.name}")
    return str(found)


def last_checkpoint(folder: Path, tell: Callable[[str], None] | None = None) -> str | None:
    """The newest checkpoint of a training that is whole; None for a start from the beginning.

    Args:
      folder: of the training.
      tell: told of torn ones that were passed over.
    """
    found = newest_good(folder, tell or (lambda line: None))
    return None if found is None else str(found)
