"""`hybrid check`: everything about an experiment that can be found out before a model is loaded.

Nothing is trained and no embedded model is made; only tokenizers, prompts and configuration files are read. What lies
on the hub and cannot be looked at from here is a warning.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
from transformers import AutoConfig, AutoTokenizer

from hybrid.config import TINY, ExperimentConfig, held_out
from hybrid.consistency import uses_teacher
from hybrid.data import DataConfig, check_prompt_lengths
from hybrid.errors import DataError, HybridError
from hybrid.mlflow_store import TrackingError, open_client
from hybrid.pictures import PICTURE_COLUMNS
from hybrid.read_config import Problem, read_document, validated
from hybrid.rewards import build_rewards
from hybrid.sources import held_out_prompts, model_folder, shared_prompts, training_prompts
from hybrid.sweep_config import read_sweep, too_few_seeds
from hybrid.teacher_config import (
    LocalTeacherConfig,
    OneTeacherConfig,
    RecordedTeacherConfig,
    RoutedTeacherConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    teachers_of,
)
from hybrid.tiny import tiny_tokenizer
from hybrid.tiny_tasks import VISION_TASKS, tiny_task
from hybrid.tiny_vision import vision_processor
from hybrid.yaml_file import Document, KeyPath, dotted
from teachers.errors import TeacherError
from teachers.findings import Finding as TeacherFinding
from teachers.findings import PreflightFailed
from teachers.processors import load_processor, reads_images
from teachers.tokenizer_check import tokenizer_findings

DATABASES = ("sqlite:", "mysql", "postgresql", "mssql")
"""Tracking URIs that are opened by nothing less than a connection."""

UNASKED = "is asked by no method of this experiment"

WRITTEN_BY = "write it first, e.g. with `hybrid teacher demonstrate`"

FILE_ENDINGS = frozenset({".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".yaml"})


@dataclass(frozen=True)
class Finding:
    """What the check says about one thing.

    Attributes:
      level: an error stops a run, a warning may not, a fact is neither.
      problem: where, which key, and what.
    """

    level: Literal["error", "warning", "fact"]
    problem: Problem

    def __str__(self) -> str:
        """The finding as one line."""
        return str(self.problem)


def check_experiment(path: Path, overrides: Sequence[str] = (), *, live: bool = False) -> list[Finding]:
    """Looks at an experiment file, or at the cells of a sweep file, and at what they name.

    Args:
      path: the YAML file.
      overrides: `a.b.c=value` each.
      live: also ask the teachers, which must be reachable; loads local ones.

    Returns:
      Errors, warnings and facts in the order in which they were found. Without errors the experiment can start.

    Raises:
      ConfigError: the file cannot be read, or settings are wrong or contradict each other; one line each.
    """
    document = read_document(path, overrides)
    if "base" not in document.values:
        return _findings(validated(document), document, live=live)
    sweep, cells = read_sweep(path, overrides)
    found: dict[tuple[str, str, str], Finding] = {}
    asks = any(uses_teacher(cell.config) for cell in cells)
    for cell in cells:
        if cell.seed == cells[0].seed:
            place = Document(values={}, places={}, source=f"{path}: {cell.name}")
            for finding in _findings(cell.config, place, live=live):
                if asks and finding.problem.message == UNASKED:
                    continue  # this cell's method needs no teacher, and another's does
                found.setdefault((finding.level, finding.problem.key, finding.problem.message), finding)
    few = too_few_seeds(cells)
    seeds = [] if few is None else [Finding("warning", Problem(document.place(("seeds",)), "seeds", few))]
    fact = Problem(str(path), "", f"{len(cells)} cells, compared with {sweep.baseline or 'the first method'}")
    return [*found.values(), *seeds, Finding("fact", fact)]


def _findings(config: ExperimentConfig, document: Document, *, live: bool) -> list["Finding"]:
    checker = _Checker(config, document)
    checker.run()
    if live and not checker.has_errors:
        checker.ask_teachers()
    return checker.findings


class _Checker:
    """Collects findings; each `_look_at_...` looks at one thing and stops at its first trouble."""

    def __init__(self, config: ExperimentConfig, document: Document) -> None:
        self.config = config
        self.document = document
        self.findings: list[Finding] = []

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def run(self) -> None:
        config = self.config
        rewards = self._try(("rewards",), lambda: build_rewards(config.rewards) if config.rewards else [])
        wanted = [(column, f"the reward {reward.__name__}") for reward in rewards or [] for column in reward.columns]
        student = self._tokenizer(("student", "model"), config.student.model)
        source: KeyPath = ("data", "source")
        everything = [*wanted, *self._columns_of_training()]
        rows = self._look_at_prompts(source, config.data, lambda: training_prompts(config), everything, student)
        if rows is not None and (num_rows := len(rows)) < config.train.prompts_per_step:
            path: KeyPath = ("train", "prompts_per_step")
            self._say("error", path, f"a step takes {config.train.prompts_per_step} prompts; the data has {num_rows}")
        asked = held_out(config)
        if asked is None or config.evaluate is None:
            self._say("warning", (), "nothing is evaluated on held-out prompts; `evaluate: {}` does it")
        elif rows is not None or config.evaluate.data is not None:
            source = source if config.evaluate.data is None else ("evaluate", "data")
            others = self._look_at_prompts(source, asked, lambda: held_out_prompts(config), wanted, student)
            if rows is not None and others is not None and (shared := shared_prompts(rows, others)) is not None:
                self._say("warning", source, shared)
        self._look_at_teachers(student)
        self._look_at_engine()
        self._look_at_tracking()

    def _look_at_tracking(self) -> None:
        """Whether runs can be written (a file without a name is, and is gone again), and MLflow knows the address."""
        uri = self.config.tracking.uri
        try:
            if uri is not None and "://" in uri and not uri.startswith(DATABASES):
                open_client(uri)
        except TrackingError as error:
            self._say("error", ("tracking", "uri"), str(error).removeprefix("tracking.uri: "))
        place = Path(self.config.tracking.folder).resolve()
        while not place.exists():
            place = place.parent
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            folder = self.config.tracking.folder
            self._say(
                "error", ("tracking", "folder"), f"nothing can be written to '{folder}': {place}: {error.strerror}"
            )

    def ask_teachers(self) -> None:
        """Scores a few sequences with each teacher, however it is reached, and compares what can be compared."""
        config = self.config
        if config.teacher is None:
            return
        tokenizer = self._tokenizer(("student", "model"), config.student.model)
        prompts = self._try(("data", "source"), lambda: training_prompts(config))
        for path, block in self._teachers():
            if prompts and not isinstance(block, SelfTeacherConfig | RecordedTeacherConfig):
                own = self._tokenizer((*path, "model"), block.model)
                self._try(path, lambda path=path, block=block, own=own: self._ask(path, block, prompts, tokenizer, own))

    def _ask(self, path: KeyPath, block: OneTeacherConfig, prompts: datasets.Dataset, tokenizer: Any, own: Any) -> None:
        from hybrid.preflights import ask_teacher, nearby
        from hybrid.teaching import Making, is_chat, taught

        student = model_folder(self.config.student.model, "student")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            making = Making.of(self.config, stack, folder=Path(folder), student=student, chat=is_chat(prompts))
            teacher = taught(block, str(path[-1]), making)
            try:
                compared = nearby(self.config, block, stack)
                found = ask_teacher(self.config, block, teacher, prompts, tokenizer, own, **compared)
            except PreflightFailed as error:
                found = error.findings
        for finding in found:
            self._tell(path, finding)

    def _tell(self, path: KeyPath, finding: TeacherFinding) -> None:
        level = "error" if finding.stops else "fact" if finding.ok else "warning"
        self._say(level, path, f"{finding.name}: {finding.detail}" + ("" if finding.ok else f"; {finding.fix}"))

    def _teachers(self) -> list[tuple[KeyPath, OneTeacherConfig]]:
        """Every single teacher, and where it stands in the file."""
        config = self.config.teacher
        if config is None:
            return []
        several = isinstance(config, RoutedTeacherConfig)
        return [(("teacher", "teachers", n) if several else ("teacher",), t) for n, t in teachers_of(config).items()]

    def _say(self, level: Literal["error", "warning", "fact"], path: KeyPath, message: str) -> None:
        finding = Finding(level, Problem(self.document.place(path), dotted(path), message))
        if finding not in self.findings:
            self.findings.append(finding)

    def _try(self, path: KeyPath, look: Callable[[], Any]) -> Any:
        """What `look` gives; its error, said, and None."""
        try:
            return look()
        except (HybridError, TeacherError) as error:
            self._say("error", path, str(error))
            return None

    def _look_at_prompts(
        self,
        path: KeyPath,
        source: DataConfig,
        load: Callable[[], datasets.Dataset | None],
        columns: Sequence[tuple[str, str]],
        tokenizer: Any,
    ) -> datasets.Dataset | None:
        """Loads prompts, and looks at their columns and lengths; None where they cannot be loaded."""
        try:
            rows = load()
            assert rows is not None
            has_columns(rows, columns)
            if tokenizer is not None:
                self._look_at_lengths(path, rows, tokenizer)
            return rows
        except DataError as error:
            if self._is_output(source.source):
                self._say("warning", path, f"{source.source} does not exist yet; {WRITTEN_BY}")
            elif isinstance(source.source, str) and is_hub_name(source.source) and _is_unreachable(error):
                self._unreachable(path, source.source)
            else:
                self._say("error", path, str(error))
        except HybridError as error:
            self._say("error", path, str(error))
        return None

    def _is_output(self, source: Any) -> bool:
        """Whether a file that is not there lies where runs write."""
        runs = Path(self.config.tracking.folder).resolve()
        return isinstance(source, str) and runs in Path(source).resolve().parents and not Path(source).exists()

    def _unreachable(self, path: KeyPath, name: str) -> None:
        self._say("warning", path, f"'{name}' could not be looked at: the hub does not answer from here")

    def _tokenizer(self, path: KeyPath, model: str) -> Any:
        if model.startswith(TINY) and model.removeprefix(TINY) in VISION_TASKS:
            return vision_processor().tokenizer
        if model.startswith(TINY):
            task = self._try(path, lambda: tiny_task(model.removeprefix(TINY)))
            return None if task is None else tiny_tokenizer()
        try:
            return AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            if self._is_output(model):
                self._say("warning", path, f"{model} does not exist yet; make it before this run")
            elif is_hub_name(model) and _is_unreachable(error):
                self._unreachable(path, model)
            elif Path(model).is_dir():
                self._say("error", path, f"the folder '{model}' holds no tokenizer: {_first_line(error)}")
            else:
                self._say("error", path, f"there is no model '{model}', neither as a folder nor on the hub")
        return None

    def _columns_of_training(self) -> list[tuple[str, str]]:
        """Columns that methods and teachers read, each with who reads it."""
        wanted = []
        for method in self.config.methods.values():
            needs = method.build().needs
            wanted += [(c, f"the method {method.name}") for c in ("demonstration", "teacher_accuracy") if c in needs]
        if self.config.teacher is None:
            return wanted
        for teacher in teachers_of(self.config.teacher).values():
            if teacher.context is not None and teacher.context.column is not None:
                wanted.append((teacher.context.column, "the teacher's context"))
        if isinstance(self.config.teacher, RoutedTeacherConfig) and self.config.teacher.by is not None:
            wanted.append((self.config.teacher.by, "the choice of the teacher"))
        return wanted

    def _look_at_lengths(self, path: KeyPath, rows: datasets.Dataset, tokenizer: Any) -> None:
        train = self.config.train
        limit = train.max_prompt_length
        if limit is None:
            limit = self._context(tokenizer) - train.max_completion_length
            if limit < 1:
                raise DataError(
                    f"train.max_completion_length {train.max_completion_length} leaves no room for a prompt in the "
                    f"student's context of {self._context(tokenizer)} tokens"
                )
        longest = check_prompt_lengths(
            rows, self._reader(rows) or tokenizer, limit, chat_template_kwargs=self.config.student.chat_template_kwargs
        )
        self._say("fact", path, f"{len(rows)} prompts of at most {longest} tokens")

    def _reader(self, rows: datasets.Dataset) -> Any:
        """The student's processor where rows have pictures; None where a tokenizer will do."""
        model = self.config.student.model
        if not set(PICTURE_COLUMNS).intersection(rows.column_names):
            return None
        if model.startswith(TINY):
            return vision_processor() if model.removeprefix(TINY) in VISION_TASKS else None
        return load_processor(model) if reads_images(model) else None

    def _context(self, tokenizer: Any) -> int:
        """Tokens that the student takes, prompt and completion together."""
        known = [int(tokenizer.model_max_length)]
        if not self.config.student.model.startswith(TINY):
            text_config = AutoConfig.from_pretrained(self.config.student.model).get_text_config()
            known.append(int(getattr(text_config, "max_position_embeddings", None) or known[0]))
        return min(known)

    def _look_at_teachers(self, student: Any) -> None:
        if self.config.teacher is not None and not uses_teacher(self.config):
            self._say("warning", ("teacher",), UNASKED)
        for path, teacher in self._teachers():
            if isinstance(teacher, RecordedTeacherConfig) and not Path(teacher.recorded).is_file():
                self._say("error", (*path, "recorded"), f"there is no file '{teacher.recorded}'")
            if isinstance(teacher, LocalTeacherConfig | ServedTeacherConfig):
                tokenizer = self._tokenizer((*path, "model"), teacher.model)
                if teacher.align and tokenizer is not None:
                    self._look_at_template(path, teacher, tokenizer)
                if tokenizer is not None and student is not None:
                    declared = teacher.prompt is not None
                    for finding in tokenizer_findings(
                        student, tokenizer, template_declared=declared, is_aligned=teacher.align
                    ):
                        if not finding.ok:
                            self._tell((*path, "model"), finding)

    def _look_at_template(
        self, path: KeyPath, teacher: LocalTeacherConfig | ServedTeacherConfig, tokenizer: Any
    ) -> None:
        """A teacher with another tokenizer puts a chat into its own words, for which it needs a template."""
        declared = teacher.prompt is not None and teacher.prompt.chat_template is not None
        if self.config.data.chat and tokenizer.chat_template is None and not declared:
            what = f"'{teacher.model}' has no chat template, and the prompts are chats (data.chat)"
            self._say("error", (*path, "model"), f"{what}; give it one: teacher.prompt.chat_template, a file")

    def _look_at_engine(self) -> None:
        file = self.config.engine.config_file
        if file is None:
            return
        try:
            json.loads(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            self._say("error", ("engine", "config_file"), f"'{file}' cannot be read: {error.strerror}")
        except ValueError as error:
            self._say("error", ("engine", "config_file"), f"'{file}' is no JSON: {error}")


def has_columns(rows: datasets.Dataset, wanted: Sequence[tuple[str, str]]) -> None:
    """Makes sure that each wanted column is there.

    Raises:
      DataError: names the first that is not, and who wants it.
    """
    for column, who in wanted:
        if column not in rows.column_names:
            raise DataError(f"has no column '{column}', which {who} needs; it has: {', '.join(rows.column_names)}")


def is_hub_name(name: str) -> bool:
    """Whether a name can only mean something on the hub: `owner/name` or `name`, and no such file or folder here."""
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or ":" in name
    return not looks_local and Path(name).suffix.lower() not in FILE_ENDINGS and not Path(name).exists()


def _is_unreachable(error: BaseException) -> bool:
    """Whether the hub did not answer, rather than answered that there is nothing."""
    causes = list(_causes(error))
    text = " ".join(f"{type(cause).__name__} {cause}" for cause in causes)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    return any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes) or "Offline" in text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
