"""Who scores each view of a run: teachers and contexts put together into scorers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hybrid.collect import Context, Plan, Scorer, scorers_of
from hybrid.contexts import Writer, all_wrong_only, block_context, context_of, several_contexts
from hybrid.errors import ConfigError
from hybrid.methods.base import ViewSpec
from teachers.contexts import PromptStyle
from teachers.protocol import Teacher
from teachers.scoring import ScoreSettings
from teachers.selves import AdapterOffTeacher, EmaTeacher, LiveTeacher, SnapshotTeacher


@dataclass(frozen=True, kw_only=True)
class Taught:
    """A teacher with the context and the prompt style that an experiment gives it.

    Attributes:
      teacher: who scores; None is the student itself, by the options of `spec`.
      spec: the context, and which weights of the student.
      style: how the teacher's prompts are rendered; None is like the student's.
      tokenizer: the teacher's, where it has another than the student and is given prompts in its own ids.
      parts: the single teachers of a router by name, each with what it sees.
    """

    teacher: Teacher | None
    spec: ViewSpec
    style: PromptStyle | None = None
    tokenizer: Any = None
    parts: Mapping[str, "Taught"] = field(default_factory=dict)

    @property
    def sees_the_same(self) -> bool:
        """Whether the teacher's prompt is the student's, id by id."""
        return self.spec.context is None and self.style is None and self.tokenizer is None

    def writer(self, student: Writer) -> Writer:
        """What writes this teacher's prompts; another tokenizer ends them in its own way, with its own template."""
        if self.tokenizer is None:
            return student if self.style is None else replace(student, style=self.style)
        style = self.style or PromptStyle(arguments=student.style.arguments)
        return replace(student, tokenizer=self.tokenizer, style=replace(style, ends_differently=True))

    def context(self, student: Writer) -> Context:
        """The prompts under which this teacher sees responses."""
        written = self.writer(student)
        if self.spec.context is not None or self.sees_the_same:
            return context_of(self.spec, written)
        return block_context(written, lambda rollout, group: "")


def self_teacher(
    options: Mapping[str, Any],
    student: nn.Module,
    tokenizer: Any,
    processor: Any,
    settings: ScoreSettings,
    forward_module: nn.Module | None = None,
) -> Teacher:
    """The student as its own teacher: live, a snapshot every N steps, a running mean, or without its adapter."""
    sync = options.get("sync", "live")
    common: dict[str, Any] = {"settings": settings, "processor": processor, "forward_module": forward_module}
    if sync == "snapshot":
        return SnapshotTeacher(student, tokenizer, every=int(options.get("every") or 10), **common)
    if sync == "ema":
        return EmaTeacher(student, tokenizer, decay=float(options.get("decay") or 0.95), **common)
    if sync == "base":
        return AdapterOffTeacher(student, tokenizer, **common)
    return LiveTeacher(student, tokenizer, **common)


def scorers_for(
    plan: Plan,
    specs: Mapping[str, ViewSpec],
    teacher: Any,
    *,
    student: nn.Module,
    writer: Writer,
    temperature: float,
    batch_size: int,
    token_budget: int | None = None,
    forward_module: nn.Module | None = None,
) -> dict[str, Scorer]:
    """A scorer for each view that the plan reads.

    Args:
      plan: of the objective.
      specs: how the method wants its views made; the others are the teacher under the student's own prompt.
      teacher: a teacher in any form that `HybridTrainer` takes,
        or scorers by view, which win over everything.
      student: the student's module, without wrappers.
      writer: of privileged prompts.
      temperature: at which log-probs are compared.
      batch_size: rows of one forward of a self teacher, and
      token_budget: its padded tokens; None for no such limit.
      forward_module: the student as wrapped, where a self teacher's forward must go through the wrapper.

    Raises:
      ConfigError: a live self teacher under the student's own prompt, whose gap is zero everywhere.
    """
    given = dict(teacher) if isinstance(teacher, Mapping) else {}
    settings = ScoreSettings(temperature=temperature, batch_size=batch_size, token_budget=token_budget)
    selves: dict[tuple[Any, ...], Teacher] = {}

    def own(options: Mapping[str, Any]) -> Teacher:
        key = tuple(options.get(name) for name in ("sync", "every", "decay"))
        if key not in selves:
            selves[key] = self_teacher(options, student, writer.tokenizer, writer.processor, settings, forward_module)
        return selves[key]

    if isinstance(teacher, ViewSpec):
        teacher = Taught(teacher=None, spec=teacher)
    told = writer
    if isinstance(teacher, Taught):
        given, told = {"teacher": taught_scorer(teacher, writer, own)}, teacher.writer(writer)
    elif not given:
        given = scorers_of(teacher, temperature)
    scorers = dict(given)
    for view in plan.views:
        spec = specs.get(view)
        write = writer if spec is None or spec.scorer == "self" else told
        if spec is not None and (scorer := view_scorer(spec, scorers.get(view), given.get("teacher"), write, own)):
            scorers[view] = scorer
    return scorers


def view_scorer(
    spec: ViewSpec,
    present: Scorer | None,
    teacher: Scorer | None,
    writer: Writer,
    own: Callable[[Mapping[str, Any]], Teacher],
) -> Scorer | None:
    """The scorer of a view that a method specifies; the present one, if any, wins, and may be kept to some rows."""
    if present is not None:
        if spec.options.get("rows") == "all_wrong":
            return replace(present, context=all_wrong_only(present.context, float(spec.options["fail_thr"])))
        return present
    if spec.scorer == "self":
        return Scorer(teacher=own(spec.options), context=context_of(spec, writer))
    if teacher is None:
        return None
    return replace(teacher, context=context_of(spec, writer)) if spec.context else teacher


def taught_scorer(taught: Taught, writer: Writer, own: Callable[[Mapping[str, Any]], Teacher]) -> Scorer:
    """A teacher under its experiment's context and prompt style.

    Raises:
      ConfigError: the live student under its own prompt, whose gap is zero everywhere.
    """
    spec = taught.spec
    if taught.teacher is None and taught.sees_the_same and spec.options.get("sync", "live") == "live":
        raise ConfigError(
            "the teacher is the live student under its own prompt, so the distillation signal is identically zero; "
            "give it a context, or sync: snapshot, ema or base"
        )
    context = taught.context(writer)
    if own_views := {name: part.context(writer) for name, part in taught.parts.items() if not part.sees_the_same}:
        context = several_contexts(context, own_views)
    return Scorer(teacher=taught.teacher or own(spec.options), context=context)
