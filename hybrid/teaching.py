"""Makes the teachers that an experiment's `teacher:` block describes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from datasets import Dataset

from hybrid.config import ExperimentConfig
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
    teachers_of,
)
from hybrid.tiny import Progress
from hybrid.views import Taught
from teachers.alignment import AlignedTeacher, paired_ends
from teachers.cache import CachedTeacher
from teachers.contexts import PromptStyle
from teachers.local import LocalTeacher
from teachers.protocol import Teacher

STARTED_ENV = "HYBRID_STARTED_TEACHERS"
"""Tells the processes of a run of the servers that were started for all of them, by teacher; keys stay in files."""


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
      token_budget: padded tokens of one forward of a model of this process; None for no such limit.
      chat: the prompts are chats, so a response ends with the end of a turn.
      progress: of making an embedded teacher.
    """

    temperature: float
    folder: Path
    student: str
    stack: ExitStack
    top_k: int = 0
    max_length: int | None = None
    token_budget: int | None = None
    chat: bool = False
    progress: Progress | None = None

    @staticmethod
    def of(
        config: ExperimentConfig,
        stack: ExitStack,
        *,
        folder: Path,
        student: str,
        chat: bool = False,
        progress: Progress | None = None,
    ) -> "Making":
        """What an experiment's teachers are made with; for the arguments see the attributes."""
        train = config.train
        sees_more = config.teacher is not None and any(block.context for block in teachers_of(config.teacher).values())
        longest = None if sees_more else train.max_prompt_length
        return Making(
            temperature=train.temperature,
            folder=folder,
            student=student,
            stack=stack,
            top_k=largest_support(config),
            max_length=None if longest is None else longest + train.max_completion_length + 1,
            token_budget=config.engine.max_tokens_per_micro_batch,
            chat=chat,
            progress=progress,
        )


def largest_support(config: ExperimentConfig) -> int:
    """The most candidates of a token that a method asks a teacher for, its own or the student's; 0 for none."""
    return max((top_k for _, top_k in supports_of(config)), default=0)


def largest_own_support(config: ExperimentConfig) -> int:
    """The largest support of its own that a method asks a teacher for; 0 for none."""
    return max((top_k for support, top_k in supports_of(config) if support != "student"), default=0)


def supports_of(config: ExperimentConfig) -> Iterator[tuple[str, int]]:
    """Whose most likely tokens the methods look at, and at how many."""
    for method in config.methods.values():
        objective = method.build()
        yield from objective.candidates
        yield from ((d.support, d.top_k) for d in objective.divergences if d.support != "full")


def is_chat(prompts: Dataset) -> bool:
    """Whether prompts are messages rather than plain texts."""
    return len(prompts) > 0 and not isinstance(prompts[0]["prompt"], str)


@contextmanager
def teacher_of(
    config: ExperimentConfig,
    *,
    folder: Path,
    student: str,
    chat: bool = False,
    progress: Progress | None = None,
) -> Iterator[Taught | None]:
    """An experiment's teacher in a form that `HybridTrainer` takes; closed, and its server stopped, at the end.

    Args:
      config: the experiment; without a `teacher:` block there is None.
      folder: see `Making`, as are the following.
      student: folder or name.
      chat: whether prompts are chats.
      progress: of making an embedded teacher.
    """
    with ExitStack() as stack:
        making = Making.of(config, stack, folder=folder, student=student, chat=chat, progress=progress)
        block = config.teacher
        if block is None:
            yield None
        elif isinstance(block, RoutedTeacherConfig):
            parts = {name: taught(part, name, making) for name, part in block.teachers.items()}
            yield Taught(teacher=several(block, parts), spec=ViewSpec("teacher"), parts=parts)
        else:
            yield taught(block, "teacher", making)


def taught(config: OneTeacherConfig, name: str, making: Making) -> Taught:
    """A single teacher with the prompts that it sees."""
    teacher = None if isinstance(config, SelfTeacherConfig) else one(config, name, making)
    tokenizer = teacher.tokenizer if isinstance(teacher, AlignedTeacher) else None
    return Taught(teacher=teacher, spec=spec_of(config), style=style_of(config.prompt), tokenizer=tokenizer)


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


def one(config: LocalTeacherConfig | ServedTeacherConfig | RecordedTeacherConfig, name: str, making: Making) -> Teacher:
    """A single teacher, which the stack closes."""
    if isinstance(config, RecordedTeacherConfig):
        from teachers.recorded import RecordedTeacher

        teacher: Teacher = RecordedTeacher(config.recorded, name=name)
    elif isinstance(config, ServedTeacherConfig):
        teacher = served(config, name, making)
    else:
        teacher = local(config, name, making)
    making.stack.callback(teacher.close)
    if isinstance(config, LocalTeacherConfig | ServedTeacherConfig) and config.cache is not None:
        teacher = CachedTeacher(teacher, config.cache)
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
        token_budget=config.token_budget if config.token_budget is not None else making.token_budget,
    )


def served(config: ServedTeacherConfig, name: str, making: Making) -> Teacher:
    """A teacher behind vLLM; with `serve` the server is started here, and the stack stops it."""
    from teachers.vllm import VllmTeacher

    requests = config.requests
    url, model, key_file = config.url, config.model, None
    if config.serve is not None:
        running = orjson.loads(os.environ.get(STARTED_ENV, "{}")).get(name) or started(config, making)
        url, model, key_file = running["url"], running["model"], running["key_file"]
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
        ca_file=requests.ca_file,
        compress=requests.compress,
        vocab_size=ids_known(model),
        policy=config.on_failure,
        temperature=config.temperature if config.temperature is not None else making.temperature,
    )


def started(config: ServedTeacherConfig, making: Making) -> dict[str, str]:
    """How to reach the server of a teacher, which runs from now on until the stack closes."""
    from teachers.serve import serve

    running = making.stack.enter_context(serve(serve_settings(config, making)))
    return {"url": running.url, "model": running.model, "key_file": str(running.key_file)}


def start_for_all(config: ExperimentConfig, making: Making) -> None:
    """Starts the servers that a run starts for itself, once for all the processes that are started after this.

    Args:
      config: the experiment.
      making: of its teachers; its stack stops the servers.
    """
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    wanted = {name: b for name, b in blocks.items() if isinstance(b, ServedTeacherConfig) and b.serve is not None}
    if wanted:
        table = {name: started(block, making) for name, block in wanted.items()}
        making.stack.callback(os.environ.pop, STARTED_ENV, None)
        os.environ[STARTED_ENV] = orjson.dumps(table).decode()


def ids_known(model: str) -> int | None:
    """How many ids a served model knows; None where its configuration cannot be read here, and the server decides."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    except (OSError, ValueError):
        return None


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
    """A teacher of another tokenizer: it is given its own prompts, and its scores come back on the student's tokens."""
    from transformers import AutoTokenizer

    student = AutoTokenizer.from_pretrained(making.student)
    own = AutoTokenizer.from_pretrained(model_folder(config.model, "teacher", making.progress))
    return AlignedTeacher(
        teacher, student, own, prompt_of=lambda row: row.prompt_ids, roles=paired_ends(student, own, chat=making.chat)
    )


def several(config: RoutedTeacherConfig, parts: Mapping[str, Taught]) -> Teacher:
    """Several teachers: by a column, or weighted.

    Raises:
      ConfigError: the student itself among several teachers.
    """
    from teachers.router import RoutedTeacher, WeightedTeachers

    teachers = {name: part.teacher for name, part in parts.items() if part.teacher is not None}
    if len(teachers) < len(parts):
        raise ConfigError("a self teacher stands alone, not among several teachers")
    if config.by is not None:
        return RoutedTeacher(teachers, config.by, default=config.default)
    assert config.weights is not None
    return WeightedTeachers([(config.weights[name], teacher) for name, teacher in teachers.items()])
