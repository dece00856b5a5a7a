"""What a run is, in a sentence or two: the descriptions that MLflow's table of runs shows."""

from collections.abc import Sequence
from pathlib import Path

from hybrid.config import ExperimentConfig
from hybrid.sweep_config import Cell, SweepConfig
from hybrid.teacher_config import LocalTeacherConfig, ServedTeacherConfig, teachers_of


def note(own: str | None, made: str) -> dict[str, str]:
    """The tag of a description: the user's own words, then ours."""
    return {"mlflow.note.content": made if own is None else f"{own}\n\n{made}"}


def training_note(config: ExperimentConfig, label: str, task: str, shown: str | None = None) -> str:
    """What one training does.

    Args:
      config: of the experiment.
      label: of the method in it.
      task: name of the prompts; may be empty.
      shown: what the run calls the method; None is the label.
    """
    own, shown = config.for_method(label), shown or label
    train, method = own.train, config.methods[label].name
    return (
        f"{shown}{'' if shown == method else f' ({method})'} on {task or 'its prompts'}, seed {own.seed}: "
        f"{own.student.model}, {counted(train.steps, 'step')} of {counted(train.prompts_per_step, 'prompt')} with "
        f"{counted(train.generations, 'response')} each, learning rate {own.student.lr:g}{teachers(own)}."
    )


def experiment_note(config: ExperimentConfig) -> str:
    """What stands under the parent run of an experiment."""
    labels = list(config.methods)
    same = " from the same start and on the same prompts" if len(labels) > 1 else ""
    return f"{', '.join(labels)}{same}, seed {config.seed}: {config.student.model}{teachers(config)}."


def evaluation_note(config: ExperimentConfig, model: str) -> str:
    """What an evaluation measures."""
    assert config.evaluate is not None
    answers = counted(config.evaluate.samples, "answer")
    return f"Held-out accuracy of {model} with {answers} to a prompt, seed {config.seed}."


def sweep_note(path: Path, sweep: SweepConfig, cells: Sequence[Cell]) -> str:
    """What stands under the parent run of a sweep."""
    tasks = {cell.task for cell in cells}
    parts = [counted(len({cell.label for cell in cells}), "method")]
    parts += [counted(len(tasks), "task")] if tasks != {""} else []
    parts.append(f"{counted(len({cell.seed for cell in cells}), 'matched seed')}")
    against = "" if sweep.baseline is None else f", compared with {sweep.baseline}"
    return f"{path.name}: {', '.join(parts)}; {counted(len(cells), 'training')}{against}."


def teachers(config: ExperimentConfig) -> str:
    """The models that teach, behind a comma; empty where none does."""
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    models = [block.model for block in blocks.values() if isinstance(block, LocalTeacherConfig | ServedTeacherConfig)]
    named = [str(model) for model in models if model]
    return f", taught by {', '.join(named)}" if named else ""


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
