"""Makes the teachers that an experiment's `teacher:` block describes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.methods.base import ViewSpec
from hybrid.sources import model_folder
from hybrid.teacher_config import (
    LocalTeacherConfig,
    OneTeacherConfig,
    RecordedTeacherConfig,
    RoutedTeacherConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    TeacherConfig,
)
from hybrid.tiny import Progress
from teachers.local import LocalTeacher


@contextmanager
def teacher_of(
    config: TeacherConfig | None, *, temperature: float, folder: Path, progress: Progress | None = None
) -> Iterator[Any]:
    """The teacher in a form that `HybridTrainer` takes; closed, and its server stopped, at the end.

    Args:
      config: the block; None for no teacher.
      temperature: of the rollouts, at which the teacher scores where it can.
      folder: the run's, for logs of a server that is started.
      progress: of making an embedded teacher.
    """
    if config is None or isinstance(config, SelfTeacherConfig):
        yield None if config is None else self_spec(config)
        return
    teacher = (
        several(config, temperature, folder, progress)
        if isinstance(config, RoutedTeacherConfig)
        else one(config, "teacher", temperature, folder, progress)
    )
    try:
        yield teacher
    finally:
        teacher.close()


def self_spec(config: SelfTeacherConfig) -> ViewSpec:
    """A self teacher as the specification of a view."""
    options: dict[str, Any] = {"sync": config.own.sync}
    options |= {key: value for key in ("every", "decay") if (value := getattr(config.own, key)) is not None}
    if config.context is None:
        return ViewSpec("self", None, options)
    for key in ("template", "column"):
        if (value := getattr(config.context, key)) is not None:
            options[key] = value
    return ViewSpec("self", config.context.kind, options)


def one(config: OneTeacherConfig, name: str, temperature: float, folder: Path, progress: Progress | None) -> Any:
    """A single teacher."""
    at = config.temperature if config.temperature is not None else temperature
    if isinstance(config, LocalTeacherConfig):
        return LocalTeacher.load(
            model_folder(config.model, "teacher", progress),
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            name=name,
            temperature=at,
            batch_size=config.batch_size,
            token_budget=config.token_budget,
        )
    if isinstance(config, RecordedTeacherConfig):
        from teachers.recorded import RecordedTeacher

        return RecordedTeacher(config.recorded)
    if isinstance(config, ServedTeacherConfig):
        return served(config, name, folder, progress)
    raise ConfigError("a self teacher stands alone, not among several teachers")


def served(config: ServedTeacherConfig, name: str, folder: Path, progress: Progress | None) -> Any:
    """A teacher behind vLLM, started here where the block says so."""
    from teachers.vllm import VllmTeacher

    if config.url is None:
        raise ConfigError("teacher.serve: auto is not wired yet")
    return VllmTeacher(
        config.url,
        config.model,
        name=name,
        api_key_env=config.api_key_env,
        timeout_s=config.timeout_s,
        retries=config.retries,
        policy=config.on_failure,
    )


def several(config: RoutedTeacherConfig, temperature: float, folder: Path, progress: Progress | None) -> Any:
    """Several teachers: by a column, or weighted."""
    from teachers.router import RoutedTeacher, WeightedTeachers

    teachers = {name: one(part, name, temperature, folder, progress) for name, part in config.teachers.items()}
    if config.by is not None:
        return RoutedTeacher(teachers, config.by, default=config.default)
    assert config.weights is not None
    return WeightedTeachers([(config.weights[name], teacher) for name, teacher in teachers.items()])
