"""Makes the teachers that an experiment's `teacher:` block describes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError, DataError
from hybrid.methods.base import ViewSpec
from hybrid.sources import model_folder
from hybrid.teacher_config import (
    LocalTeacherConfig,
    OneTeacherConfig,
    PromptConfig,
    RecordedTeacherConfig,
    RoutedTeacherConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    TeacherConfig,
)
from hybrid.tiny import Progress
from hybrid.views import PromptStyle, Taught
from teachers.local import LocalTeacher
from teachers.protocol import Teacher


@dataclass(frozen=True, kw_only=True)
class Making:
    """What making teachers needs beside their settings.

    Attributes:
      temperature: of the rollouts, at which a teacher scores where it can.
      folder: the run's, for the log of a server that is started.
      student: folder or name of the student, whose tokenizer another teacher's is aligned with.
      stack: closes what was opened.
      top_k: the largest support that the methods ask for.
      max_length: longest prompt and response together; None is the model's own limit.
      progress: of making an embedded teacher.
    """

    temperature: float
    folder: Path
    student: str
    stack: ExitStack
    top_k: int = 0
    max_length: int | None = None
    progress: Progress | None = None


@contextmanager
def teacher_of(
    config: TeacherConfig | None,
    *,
    temperature: float,
    folder: Path,
    student: str,
    top_k: int = 0,
    progress: Progress | None = None,
) -> Iterator[Any]:
    """The teacher in a form that `HybridTrainer` takes; closed, and its server stopped, at the end.

    Args:
      config: the block; None for no teacher.
      temperature: see `Making`, as are the following.
      folder: the run's.
      student: the student's folder.
      top_k: the largest support.
      progress: of making an embedded teacher.
    """
    with ExitStack() as stack:
        making = Making(
            temperature=temperature, folder=folder, student=student, stack=stack, top_k=top_k, progress=progress
        )
        if config is None:
            yield None
        elif isinstance(config, RoutedTeacherConfig):
            yield several(config, making)
        else:
            teacher = None if isinstance(config, SelfTeacherConfig) else one(config, "teacher", making)
            yield Taught(teacher=teacher, spec=spec_of(config), style=style_of(config.prompt))


def spec_of(config: OneTeacherConfig) -> ViewSpec:
    """The context of a teacher, and for the student itself which of its weights, as the specification of a view."""
    options: dict[str, Any] = {}
    if isinstance(config, SelfTeacherConfig):
        options["sync"] = config.own.sync
        options |= {key: value for key in ("every", "decay") if (value := getattr(config.own, key)) is not None}
    if config.context is not None:
        for key in ("template", "column", "ratio"):
            if (value := getattr(config.context, key)) is not None:
                options[key] = value
    scorer = "self" if isinstance(config, SelfTeacherConfig) else "teacher"
    return ViewSpec(scorer, config.context.kind if config.context else None, options)


def style_of(config: PromptConfig | None) -> PromptStyle | None:
    """How a teacher's prompts are rendered; None is like the student's.

    Raises:
      DataError: the file with the chat template cannot be read.
    """
    if config is None:
        return None
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"teacher.prompt.chat_template: {config.chat_template}: {error.strerror}") from error
    return PromptStyle(
        chat_template=template,
        system=config.system,
        arguments=config.chat_template_kwargs,
        ends_differently=config.ends_differently,
    )


def one(config: OneTeacherConfig, name: str, making: Making) -> Teacher:
    """A single teacher, which the stack closes.

    Raises:
      ConfigError: the student itself among several teachers.
    """
    if isinstance(config, SelfTeacherConfig):
        raise ConfigError("a self teacher stands alone, not among several teachers")
    if isinstance(config, RecordedTeacherConfig):
        from teachers.recorded import RecordedTeacher

        teacher: Teacher = RecordedTeacher(config.recorded)
    elif isinstance(config, ServedTeacherConfig):
        teacher = served(config, name, making)
    else:
        teacher = local(config, name, making)
    making.stack.callback(teacher.close)
    if isinstance(config, LocalTeacherConfig | ServedTeacherConfig) and config.align:
        return aligned(config, teacher, making)
    return teacher


def local(config: LocalTeacherConfig, name: str, making: Making) -> Teacher:
    """A model of this process."""
    return LocalTeacher.load(
        model_folder(config.model, "teacher", making.progress),
        dtype=config.dtype,
        device=config.device,
        quantization=config.quantization,
        name=name,
        temperature=config.temperature if config.temperature is not None else making.temperature,
        batch_size=config.batch_size,
        token_budget=config.token_budget,
    )


def served(config: ServedTeacherConfig, name: str, making: Making) -> Teacher:
    """A teacher behind vLLM; with `serve` the server is started here, and the stack stops it."""
    from teachers.vllm import VllmTeacher

    requests = config.requests
    url, model, key_file = config.url, config.model, None
    if config.serve is not None:
        from teachers.serve import serve

        running = making.stack.enter_context(serve(serve_settings(config, making)))
        url, model, key_file = running.url, running.model, running.key_file
    assert url is not None
    return VllmTeacher(
        url,
        model,
        name=name,
        api_key_env=config.api_key_env,
        api_key_file=key_file,
        window=requests.window,
        timeout_s=requests.timeout_s,
        retries=requests.retries,
        policy=config.on_failure,
        temperature=config.temperature if config.temperature is not None else making.temperature,
    )


def serve_settings(config: ServedTeacherConfig, making: Making) -> Any:
    """How a teacher's server is started: its block's settings over what the run needs."""
    from teachers.serve import ServeConfig

    own = {} if config.serve == "auto" or config.serve is None else config.serve.model_dump(exclude_none=True)
    gpus = own.pop("gpus", None)
    wanted = {
        "max_logprobs": max(making.top_k, 20),
        "max_model_len": making.max_length,
        "log_file": making.folder / "teacher.log",
    }
    if gpus is not None:
        wanted["gpus"] = gpus
    return ServeConfig(model=model_folder(config.model, "teacher", making.progress), **(wanted | own))


def aligned(config: LocalTeacherConfig | ServedTeacherConfig, teacher: Teacher, making: Making) -> Teacher:
    """A teacher of another tokenizer, whose scores are brought back to the student's tokens."""
    from transformers import AutoTokenizer

    from teachers.alignment import AlignedTeacher

    student = AutoTokenizer.from_pretrained(making.student)
    return AlignedTeacher(teacher, student, AutoTokenizer.from_pretrained(config.model))


def several(config: RoutedTeacherConfig, making: Making) -> Teacher:
    """Several teachers: by a column, or weighted."""
    from teachers.router import RoutedTeacher, WeightedTeachers

    teachers = {name: one(part, name, making) for name, part in config.teachers.items()}
    if config.by is not None:
        return RoutedTeacher(teachers, config.by, default=config.default)
    assert config.weights is not None
    return WeightedTeachers([(config.weights[name], teacher) for name, teacher in teachers.items()])
