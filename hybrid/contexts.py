"""The prompts under which scorers see responses: what a context shows beside the prompt, and how it is written.

A context is a function from rollouts to prompts (`hybrid.collect.Context`); a row for which it has nothing to show gets
no prompt, hence no score, and keeps its reward term.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid.collect import Context, ContextPrompt, unchanged
from hybrid.errors import ConfigError, DataError
from hybrid.methods.base import ViewSpec
from hybrid.rollouts import Rollout
from teachers.contexts import (
    TEMPLATES,
    PromptStyle,
    contrast_answers,
    contrast_trajectories,
    degraded_image,
    degraded_text,
    fill,
    privileged_prompt,
    render,
    without_thinking,
)

Judge = Callable[[str], str | None]
"""The answer that the verifier reads in a response, in the verifier's own form; None where it reads none."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How privileged prompts are written.

    Attributes:
      tokenizer: the student's, which is the scorer's too.
      processor: for prompts with images.
      style: the scorer's chat template, system message and thinking mode.
      max_length: tokens that the scorer takes; longer prompts are errors, never cut.
      judge: of the run's verifier; None where no reward reads an answer.
      answer_column: column of the reference answer.
      success_at: a reward of at least this is a right answer (SIPO's success threshold).
      templates: own words of contexts by name, each a text that ends with {prompt}; others are `TEMPLATES`.
    """

    tokenizer: Any
    processor: Any = None
    style: PromptStyle = field(default_factory=PromptStyle)
    max_length: int | None = None
    judge: Judge | None = None
    answer_column: str = "answer"
    success_at: float = 0.5
    templates: Mapping[str, str] = field(default_factory=dict)

    def template(self, name: str) -> str:
        """The block that stands before the prompt in the context of that name.

        Raises:
          ConfigError: own words that do not end with {prompt}.
        """
        return before_prompt(self.templates[name]) if name in self.templates else TEMPLATES[name]

    def write(self, rollout: Rollout, block: str) -> ContextPrompt:
        """The prompt of a row with a privileged block before it."""
        rendered = privileged_prompt(
            rollout.prompt,
            block,
            self.tokenizer,
            student_ids=rollout.prompt_ids,
            completion_tokens=len(rollout.completion_ids),
            max_length=self.max_length,
            style=self.style,
            images=rollout.images,
            processor=self.processor,
        )
        return ContextPrompt(prompt_ids=rendered.ids)

    def answer(self, rollout: Rollout) -> str:
        """The reference answer, as the data set writes it."""
        return column(rollout, self.answer_column)

    def correct(self, rollout: Rollout, options: Mapping[str, Any]) -> bool | None:
        """The verifier's outcome; None for an unscored response. A view's own threshold is its option `thr`."""
        thr = float(options.get("thr", self.success_at))
        return None if rollout.reward != rollout.reward else rollout.reward >= thr

    def judged(self, rollout: Rollout) -> str | None:
        """The answer that the verifier read.

        Raises:
          ConfigError: no reward of the run reads an answer.
        """
        if self.judge is None:
            raise ConfigError(
                "a context of right and wrong answers needs a reward that reads an answer (math, exact, "
                "reasoning_gym), or contrast_context: trajectory"
            )
        return self.judge(rollout.text)


def column(rollout: Rollout, name: str) -> str:
    """A column's text.

    Raises:
      DataError: the data set has no such column, or it is null in this row.
    """
    value = rollout.columns.get(name)
    if value is None:
        raise DataError(
            f"a context needs the column {name!r}, and the prompt {str(rollout.prompt)[:60]!r} has none; it has: "
            f"{', '.join(sorted(rollout.columns)) or 'no other column'}"
        )
    return str(value)


def groups_of(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """The whole groups of the own rows, in order of position."""
    wanted = {rollout.group for rollout in own}
    groups: dict[int, list[Rollout]] = {group: [] for group in wanted}
    for rollout in everyone:
        if rollout.group in wanted:
            groups[rollout.group].append(rollout)
    return {group: sorted(rows, key=lambda rollout: rollout.position) for group, rows in groups.items()}


def block_context(writer: Writer, block_of: Callable[[Rollout, Sequence[Rollout]], str | None]) -> Context:
    """A context whose block is a function of the row and its group; None shows the row nothing."""

    def context(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt | None]:
        groups = groups_of(own, everyone)
        blocks = [block_of(rollout, groups[rollout.group]) for rollout in own]
        return [
            None if block is None else writer.write(rollout, block) for rollout, block in zip(own, blocks, strict=True)
        ]

    return context


def contrast(writer: Writer, side: int, options: Mapping[str, Any]) -> Context:
    """SIPO's pair of contexts (methods of arXiv 2609.36742): side 0 shows the right one, side 1 the wrong one."""
    kind = options.get("contrast_context", "answer")
    negative, unjudged = options.get("negative", "own"), options.get("unjudged", "skip")

    def from_answers(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
        reference = writer.answer(rollout)
        judged, correct = [writer.judged(r) for r in group], [writer.correct(r, options) for r in group]
        pair = contrast_answers(judged, correct, reference, negative, unjudged)[place(rollout, group)]
        return None if pair is None else fill(writer.template("reference_answer"), {"answer": pair[side]})

    def from_siblings(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
        correct = [writer.correct(r, options) for r in group]
        pair = contrast_trajectories([r.text for r in group], correct)[place(rollout, group)]
        if pair is None:
            return None
        return fill(writer.template("sibling_solution"), {"solution": without_thinking(group[pair[side]].text)})

    def block(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
        if kind == "answer":
            return from_answers(rollout, group)
        shown = from_siblings(rollout, group)
        return from_answers(rollout, group) if shown is None and kind == "auto" else shown

    return block_context(writer, block)


def all_wrong_only(inner: Context, fail_thr: float) -> Context:
    """The same prompts, but only for groups without a reward above `fail_thr`: the others need no score (RSTG)."""

    def context(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt | None]:
        groups = groups_of(own, everyone)
        failed = {group for group, rows in groups.items() if not any(row.reward > fail_thr for row in rows)}
        prompts = inner(own, everyone)
        return [prompt if r.group in failed else None for r, prompt in zip(own, prompts, strict=True)]

    return context


def place(rollout: Rollout, group: Sequence[Rollout]) -> int:
    """Index of a row in its group."""
    return [r.position for r in group].index(rollout.position)


def sibling(writer: Writer, options: Mapping[str, Any], *, right: bool, template: str) -> Context:
    """Shows another response of the group: one that was right, or one that was wrong, to be corrected."""

    def block(rollout: Rollout, group: Sequence[Rollout]) -> str | None:
        others = [r for r in group if r.position != rollout.position and writer.correct(r, options) is right]
        others = [r for r in others if without_thinking(r.text)]
        if not others:
            return None
        shown = without_thinking(others[rollout.position % len(others)].text)
        return fill(
            template, {**texts(rollout), "solution": shown, "attempt": shown, "feedback": "Its answer is wrong."}
        )

    return block_context(writer, block)


def texts(rollout: Rollout) -> dict[str, str]:
    """The row's columns as fields of a template."""
    return {name: str(value) for name, value in rollout.columns.items() if name.isidentifier() and value is not None}


def spoken(prompt: Any, value: Any) -> Any:
    """A column's prompt in the form of the row's own: in a chat, a text becomes its last message, with its pictures."""
    if isinstance(prompt, str) or not isinstance(value, str):
        return value
    *before, last = prompt
    parts = [] if isinstance(last["content"], str) else [p for p in last["content"] if p["type"] != "text"]
    return [*before, {**last, "content": [*parts, {"type": "text", "text": value}] if parts else value}]


def from_column(writer: Writer, name: str) -> Context:
    """A column of the data set in place of the whole prompt."""

    def context(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt | None]:
        prompts: list[ContextPrompt | None] = []
        for rollout in own:
            value = rollout.columns[name] if name in rollout.columns else column(rollout, name)
            if value is None:
                prompts.append(None)
            else:
                rendered = render(
                    spoken(rollout.prompt, value),
                    writer.tokenizer,
                    writer.style,
                    images=rollout.images,
                    processor=writer.processor,
                )
                prompts.append(ContextPrompt(prompt_ids=rendered.ids))
        return prompts

    return context


def degraded(writer: Writer, options: Mapping[str, Any]) -> Context:
    """VA-OPD's poorer view (arXiv 2605.21924): pixelated images, a column with the degraded prompt, or masked text.

    Where other rows have images, a row without any has nothing to hide: both of its views are the same.
    """
    ratio, name = float(options.get("ratio", 0.1)), str(options.get("column", "degraded"))

    def prompt(rollout: Rollout) -> ContextPrompt:
        if rollout.images:
            images = tuple(degraded_image(image, ratio=ratio) for image in rollout.images)
            return ContextPrompt(prompt_ids=rollout.prompt_ids, images=images)
        if rollout.columns.get(name) is not None:
            value = spoken(rollout.prompt, rollout.columns[name])
            return ContextPrompt(prompt_ids=render(value, writer.tokenizer, writer.style).ids)
        if isinstance(rollout.prompt, str):
            return ContextPrompt(
                prompt_ids=render(degraded_text(rollout.prompt, ratio=ratio), writer.tokenizer, writer.style).ids
            )
        raise DataError(
            f"the view degraded needs images, or a column {name!r} with the prompt that hides the detail; the data set "
            "has neither"
        )

    def context(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt]:
        if any(rollout.images for rollout in everyone):
            return [prompt(r) if r.images else ContextPrompt(prompt_ids=r.prompt_ids) for r in own]
        return [prompt(rollout) for rollout in own]

    return context


def context_of(spec: ViewSpec, writer: Writer) -> Context:
    """The context that a view's specification names.

    Raises:
      ConfigError: there is no such context.
    """
    options = spec.options
    template = options.get("template")

    def block_template(name: str) -> str:
        return before_prompt(str(template)) if template is not None else writer.template(name)

    if spec.context is None:
        return unchanged
    if spec.context in ("right", "wrong"):
        return contrast(writer, int(spec.context == "wrong"), options)
    if spec.context == "degraded":
        return degraded(writer, options)
    if spec.context == "column":
        return from_column(writer, str(options["column"]))
    if spec.context in ("sibling", "reflection"):
        right = spec.context == "sibling"
        words = block_template("sibling_solution" if right else "reflection")
        return sibling(writer, options, right=right, template=words)
    if spec.context in ("answer", "hint", "instruction"):
        name = {"answer": "reference_answer"}.get(spec.context, spec.context)
        text, source = block_template(name), str(options.get("column") or writer.answer_column)
        return block_context(
            writer, lambda rollout, group: fill(text, {**texts(rollout), "answer": str(rollout.columns.get(source))})
        )
    if spec.context == "wrong_answer":
        return contrast(writer, 1, {"contrast_context": "answer", "negative": "mode", **options})
    raise ConfigError(f"there is no context {spec.context!r}")


def before_prompt(template: str) -> str:
    """The block of a template that ends with {prompt}.

    Raises:
      ConfigError: the prompt stands elsewhere; both prompts must end identically.
    """
    if template.count("{prompt}") != 1 or not template.rstrip().endswith("{prompt}"):
        raise ConfigError(
            "a context template ends with {prompt}, so that teacher and student prompts end identically; got "
            f"{template!r}"
        )
    return template.rstrip().removesuffix("{prompt}")


def several_contexts(shared: Context, single: Mapping[str, Context]) -> Context:
    """One context for several teachers, of which some have their own."""

    def context(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt | None]:
        prompts = {name: part(own, everyone) for name, part in single.items()}
        return [
            None if prompt is None else replace(prompt, seen_by={name: seen[i] for name, seen in prompts.items()})
            for i, prompt in enumerate(shared(own, everyone))
        ]

    return context


def judge_of(rewards: Sequence[Any]) -> Judge | None:
    """What the first reward that reads an answer reads."""
    return next(
        (reward.judged_answer for reward in rewards if getattr(reward, "judged_answer", None) is not None), None
    )
