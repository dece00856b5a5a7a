"""Asks the teachers of an experiment before it begins: can each of them score this student, and does it so rightly."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from hybrid.config import TINY, ExperimentConfig
from hybrid.sources import model_folder
from hybrid.teacher_config import (
    LocalTeacherConfig,
    OneTeacherConfig,
    RecordedTeacherConfig,
    ServedTeacherConfig,
    teachers_of,
)
from hybrid.teaching import largest_own_support
from hybrid.tiny import Role
from hybrid.views import Taught
from teachers.contexts import PLAIN, PromptStyle, render
from teachers.findings import Finding
from teachers.local import LocalTeacher
from teachers.preflight import preflight
from teachers.processors import load_processor, reads_images
from teachers.protocol import Row, Teacher, Want

NUM_ASKED = 4
"""Prompts that a teacher is asked about."""

COMPLETION = "3,8,12#12"
"""What it is asked to score; any text of a few tokens would do."""

_WITH_MODEL = (LocalTeacherConfig, ServedTeacherConfig)


def ask_teachers(
    config: ExperimentConfig, taught: Taught, prompts: Dataset, student: Any, own: Mapping[str, Any]
) -> dict[str, list[Finding]]:
    """The findings of every teacher that can be asked ahead: not the student itself, and no recording.

    Args:
      config: the experiment.
      taught: its teacher, as `hybrid.teaching.teacher_of` gives it.
      prompts: of the training.
      student: its tokenizer.
      own: the teachers' tokenizers by name, where they are known here.

    Raises:
      PreflightFailed: the first teacher that cannot score this student; it carries the findings.
    """
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    singles = taught.parts or dict.fromkeys(blocks, taught)
    return {
        name: ask_teacher(config, block, singles[name], prompts, student, own.get(name))
        for name, block in blocks.items()
        if singles[name].teacher is not None and not isinstance(block, RecordedTeacherConfig)
    }


def preflight_lines(config: ExperimentConfig, taught: Taught | None, prompts: Dataset, student: str) -> list[str]:
    """Asks all teachers of a run that begins, and tells the result, a line for each teacher and each warning.

    Args:
      config: the experiment.
      taught: its teacher; None where it has none.
      prompts: of the training.
      student: its folder or name.

    Raises:
      PreflightFailed: a teacher cannot score this student.
    """
    if taught is None:
        return []
    reader = load_processor(student).tokenizer if reads_images(student) else AutoTokenizer.from_pretrained(student)
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    own = {name: tokenizer_of(block.model) for name, block in blocks.items() if isinstance(block, _WITH_MODEL)}
    lines = []
    for name, findings in ask_teachers(config, taught, prompts, reader, own).items():
        lines.append(f"{name}: {sum(finding.ok for finding in findings)} of {len(findings)} checks passed")
        lines += [f"  {finding}" for finding in findings if not finding.ok]
    return lines


def tokenizer_of(model: str) -> Any:
    """A teacher's tokenizer; None where it cannot be had here."""
    try:
        return AutoTokenizer.from_pretrained(model_folder(model, "teacher"))
    except (OSError, ValueError):
        return None


def nearby(config: ExperimentConfig, block: OneTeacherConfig, stack: ExitStack) -> dict[str, Any]:
    """What a teacher's scores can be compared with: the student, and a model of its own weights, where these are here.

    Args:
      config: the experiment.
      block: the teacher's settings.
      stack: closes the models.

    Returns:
      Arguments of `ask_teacher`.
    """

    def load(model: str, name: Role) -> LocalTeacher:
        folder = model_folder(model, name)
        teacher = LocalTeacher.load(folder, name=name, temperature=config.train.temperature)
        stack.callback(teacher.close)
        return teacher

    served = block if isinstance(block, ServedTeacherConfig) else None
    found: dict[str, Any] = {}
    if not reads_images(model_folder(config.student.model, "student")):
        found["student_model"] = load(config.student.model, "student")
        found["is_student"] = served is not None and served.model == config.student.model
    if served is not None and (served.model.startswith(TINY) or Path(served.model).is_dir()):
        found["local_check"] = load(served.model, "teacher")
    return found


def ask_teacher(
    config: ExperimentConfig,
    block: OneTeacherConfig,
    taught: Taught,
    prompts: Dataset,
    student: Any,
    own: Any,
    *,
    student_model: Teacher | None = None,
    is_student: bool = False,
    local_check: Teacher | None = None,
) -> list[Finding]:
    """The findings of one teacher; see `teachers.preflight`.

    Args:
      config: the experiment.
      block: the teacher's settings.
      taught: the teacher, with the prompts that it sees.
      prompts: of the training.
      student: its tokenizer.
      own: the teacher's; None where it is not known here.
      student_model: the student as a teacher, for the gap; None does not look at it.
      is_student: the teacher has the student's weights.
      local_check: a model of this process with the teacher's weights.

    Raises:
      PreflightFailed: a check that stops the run; the error carries the findings.
    """
    assert taught.teacher is not None
    train = config.train
    plain = PromptStyle(arguments=config.student.chat_template_kwargs)
    style = taught.style or plain
    completion_ids = tuple(student(COMPLETION, add_special_tokens=False)["input_ids"])
    shown = prompts[:NUM_ASKED]["prompt"]
    student_rows = [row(prompt, student, plain, completion_ids) for prompt in shown]
    rows = [row(prompt, taught.tokenizer or student, style, completion_ids) for prompt in shown]
    longest = train.max_prompt_length or max(len(asked.prompt_ids) for asked in rows)
    return preflight(
        taught.teacher,
        student_tokenizer=student,
        sample_rows=rows,
        student_rows=student_rows,
        max_length=longest + train.max_completion_length,
        want=Want(top_k=largest_own_support(config)),
        teacher_tokenizer=own,
        temperature=train.temperature,
        expected_model=block.model if isinstance(block, ServedTeacherConfig) and block.url is not None else None,
        template_declared=block.prompt is not None,
        is_aligned=taught.tokenizer is not None,
        student_model=student_model,
        is_student=is_student and taught.sees_the_same,
        local_check=None if taught.tokenizer is not None else local_check,
    )


def row(prompt: Any, tokenizer: Any, style: PromptStyle, completion_ids: Sequence[int]) -> Row:
    """A prompt with a made-up completion, as it would be handed to a teacher."""
    rendered = render(prompt, tokenizer, PLAIN if isinstance(prompt, str) else style)
    return Row(prompt_ids=rendered.ids, completion_ids=tuple(completion_ids))
