"""Where the models and prompts of an experiment come from, embedded ones included."""

from collections.abc import Mapping
from types import MappingProxyType

import datasets
import orjson

from hybrid.config import HELD_OUT_SEED, TINY, ExperimentConfig, held_out, splits_off
from hybrid.data import Builder, DataConfig, load_prompts
from hybrid.errors import DataError
from hybrid.pictures import PICTURE_COLUMNS
from hybrid.tiny import Progress, Role, ensure_tiny
from hybrid.tiny_figures import vision_dataset
from hybrid.tiny_tasks import VISION_TASKS, tiny_dataset

TINY_ROWS = 512
"""Problems of an embedded task where `data.limit` does not say."""


def tiny_prompts(config: DataConfig, seed: int) -> datasets.Dataset:
    """The rows of `tiny:TASK`; see `hybrid.tiny_tasks.tiny_dataset` and `hybrid.tiny_figures.vision_dataset`."""
    assert isinstance(config.source, str)
    task = config.source.removeprefix(TINY)
    if task in VISION_TASKS:
        return vision_dataset(task, config.split, config.limit or TINY_ROWS, seed)
    return tiny_dataset(task, config.split, config.limit or TINY_ROWS, seed)  # pyright: ignore


BUILDERS: Mapping[str, Builder] = MappingProxyType({"tiny": tiny_prompts})
"""Makers of embedded prompts, by the word before the colon."""


def training_prompts(config: ExperimentConfig) -> datasets.Dataset:
    """The prompts of the training; see `load_prompts` for the errors.

    Raises:
      DataError: also where too few rows are left beside the held-out ones.
    """
    rows = load_prompts(config.data, seed=config.seed, builders=BUILDERS)
    if not splits_off(config):
        return rows
    assert config.evaluate is not None
    num_left = len(rows) - config.evaluate.prompts
    if num_left < 1:
        raise DataError(
            f"{config.data.source}: has {len(rows)} rows, and evaluate.prompts {config.evaluate.prompts} of them are "
            "held out, so none is left to train on; lower evaluate.prompts, or name others with evaluate.data"
        )
    return rows.select(range(num_left))


def held_out_prompts(config: ExperimentConfig) -> datasets.Dataset | None:
    """The prompts of the evaluation, the same for every seed; None where nothing is evaluated.

    Raises:
      DataError: they cannot be loaded.
    """
    source = held_out(config)
    if source is None or config.evaluate is None:
        return None
    rows = load_prompts(source, seed=HELD_OUT_SEED, builders=BUILDERS)
    num = min(len(rows), config.evaluate.prompts)
    return rows.select(range(len(rows) - num, len(rows)) if splits_off(config) else range(num))


def shared_prompts(training: datasets.Dataset, held_out: datasets.Dataset) -> str | None:
    """What to tell of held-out prompts that are trained on too; None where there are none, or rows have pictures."""
    if set(PICTURE_COLUMNS) & set(held_out.column_names):
        return None  # the words alone do not tell such rows apart
    trained = {orjson.dumps(prompt) for prompt in training["prompt"]}
    num = sum(orjson.dumps(prompt) in trained for prompt in held_out["prompt"])
    if not num:
        return None
    return (
        f"{num} of {len(held_out)} held-out prompts stand among those of the training too, so that part of their "
        "accuracy may be memory; take a task with more problems, or name other prompts with evaluate.data"
    )


def model_folder(name: str, role: Role, progress: Progress | None = None) -> str:
    """What `from_pretrained` takes for a model of the experiment; an embedded one is made first where it is missing."""
    if not name.startswith(TINY):
        return name
    task = name.removeprefix(TINY)
    if task in VISION_TASKS:
        from hybrid.tiny_vision import ensure_tiny_vision

        return str(ensure_tiny_vision(task, role, progress=progress))
    return str(ensure_tiny(task, role, progress=progress))
