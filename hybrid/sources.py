"""Where the models and prompts of an experiment come from, embedded ones included."""

from collections.abc import Mapping
from types import MappingProxyType

import datasets

from hybrid.config import HELD_OUT_SEED, TINY, ExperimentConfig, held_out
from hybrid.data import Builder, DataConfig, load_prompts
from hybrid.tiny import Progress, Role, ensure_tiny
from hybrid.tiny_tasks import tiny_dataset

TINY_ROWS = 512
"""Problems of an embedded task where `data.limit` does not say."""


def tiny_prompts(config: DataConfig, seed: int) -> datasets.Dataset:
    """The rows of `tiny:TASK`; see `hybrid.tiny_tasks.tiny_dataset`."""
    assert isinstance(config.source, str)
    return tiny_dataset(config.source.removeprefix(TINY), config.split, config.limit or TINY_ROWS, seed)  # pyright: ignore


BUILDERS: Mapping[str, Builder] = MappingProxyType({"tiny": tiny_prompts})
"""Makers of embedded prompts, by the word before the colon."""


def training_prompts(config: ExperimentConfig) -> datasets.Dataset:
    """The prompts of the training; see `load_prompts` for the errors."""
    return load_prompts(config.data, seed=config.seed, builders=BUILDERS)


def held_out_prompts(config: ExperimentConfig) -> datasets.Dataset | None:
    """The prompts of the evaluation, the same for every seed; None where nothing is evaluated.

    Raises:
      DataError: they cannot be loaded.
      ConfigError: the training's source has no held-out part, and none is named.
    """
    source = held_out(config)
    if source is None or config.evaluate is None:
        return None
    rows = load_prompts(source, seed=HELD_OUT_SEED, builders=BUILDERS)
    return rows.select(range(min(len(rows), config.evaluate.prompts)))


def model_folder(name: str, role: Role, progress: Progress | None = None) -> str:
    """What `from_pretrained` takes for a model of the experiment; an embedded one is made first where it is missing."""
    if name.startswith(TINY):
        return str(ensure_tiny(name.removeprefix(TINY), role, progress=progress))
    return name
