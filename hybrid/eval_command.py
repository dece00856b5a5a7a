"""`hybrid eval`: the held-out accuracy of a checkpoint, of a folder or hub model, or of a model behind a server."""

from pathlib import Path

import orjson
from rich.console import Console

from hybrid.config import ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.evaluate import Evaluation
from hybrid.launch import open_parent, quiet, run_folder
from hybrid.progress import Bars
from hybrid.rewards import build_rewards
from hybrid.run_notes import evaluation_note, note
from hybrid.served_evaluation import evaluate_served
from hybrid.sources import checkpoint_folder, held_out_prompts, model_folder
from hybrid.stopping import Stop
from hybrid.summary_table import print_evaluation
from hybrid.training import Setting, load_student, run_evaluation, sampling_of


def evaluate_experiment(
    config: ExperimentConfig,
    *,
    source: Path,
    checkpoint: str | None = None,
    served: str | None = None,
    served_model: str | None = None,
) -> int:
    """Measures a model on the held-out prompts of an experiment, and notes the result in MLflow and in a file.

    Args:
      config: the experiment, checked.
      source: its file, for messages.
      checkpoint: folder of a model; without it and `served`, the student before its training.
      served: address of a vLLM server, in place of a model that is loaded here.
      served_model: as that server calls it; None is the first that it has.

    Returns:
      The exit code 0.

    Raises:
      ConfigError: the experiment evaluates nothing, or two models are named.
      DataError: there is no model, or the server does not answer as it should.
    """
    quiet()
    console = Console()
    held_out = held_out_prompts(config)
    if held_out is None:
        raise ConfigError(f"{source}: evaluate is null, so there is nothing to measure; write evaluate: {{}}")
    if checkpoint is not None and served is not None:
        raise ConfigError("--checkpoint and --served name two models; give one")
    if served_model is not None and served is None:
        raise ConfigError("--served-model belongs to --served, the address of the server")
    chosen = None if checkpoint is None else checkpoint_folder(checkpoint)
    folder = run_folder(config, None)
    rewards = build_rewards(config.rewards)
    with Bars(console) as bars, open_parent(config, folder) as parent:
        model = chosen or config.student.model
        if served is not None:
            show = bars.part("evaluation")
            model, found = evaluate_served(
                served, served_model, held_out, rewards, sampling_of(config), config.student.chat_template_kwargs, show
            )
        else:
            student = chosen or model_folder(config.student.model, "student", bars.advance)
            setting = Setting(
                config=config,
                folder=folder,
                student=student,
                prompts=held_out,
                held_out=held_out,
                rewards=rewards,
                teacher=None,
                uri=parent.uri,
                parent_run_id=parent.run_id,
                bars=bars,
                stop=Stop(bars.say),  # not entered: ctrl-C ends an evaluation at once
            )
            found = run_evaluation(setting, *load_student(config, student))
        described = note(config.tracking.note, evaluation_note(config, model))
        parent.tags({"hybrid.kind": "evaluation", "hybrid.model": model, **described})
        parent.params({"model": model, "sampling": found.sampling.__dict__})
        parent.metrics(found.metrics(), 0)
        (folder / "evaluation.json").write_bytes(orjson.dumps(summary(found, model), option=orjson.OPT_INDENT_2))
        parent.artifact_file(folder / "evaluation.json")
    print_evaluation(console, found, model)
    console.print(f"written: {folder / 'evaluation.json'}", highlight=False, markup=False, soft_wrap=True)
    return 0


def summary(found: Evaluation, model: str) -> dict[str, object]:
    """What the file holds: the model, how it answered, and what came of it."""
    return {"model": model, "sampling": found.sampling.__dict__, **found.metrics(), "intervals": found.intervals()}
