"""Rollouts, rewards and teacher scores become one `RolloutBatch`; the only place that joins them.

Nothing here knows a trainer: the caller passes ids, rewards and a function that measures the student, and gets back the
batch of its own rows. Contexts that need siblings see the rows of every process.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybrid.distributions import coarse_reverse_kl
from hybrid.errors import ConfigError, DataError, MissingMeasurement
from hybrid.objective.losses import Divergence, SampledDivergence, Support
from hybrid.objective.objective import Objective
from hybrid.types import Demonstration, RolloutBatch, View
from teachers.errors import TeacherCannot
from teachers.findings import Finding, PreflightFailed
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from teachers.scores import TeacherScores
from teachers.tokenizer_check import tokenizer_findings


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response and what came with it.

    Attributes:
      prompt: the data set's prompt, a string or chat messages.
      prompt_ids: as the student saw it.
      completion_ids: as the student sampled it, without padding.
      text: the decoded completion.
      group: number of its prompt, the same on every process.
      position: place within its group.
      reward: weighted sum; NaN for unscored.
      columns: every other column of the data set.
      images: the prompt's images.
    """

    prompt: Any
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    group: int
    position: int
    reward: float
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ContextPrompt:
    """A prompt under which a scorer sees one response.

    Attributes:
      prompt_ids: in the scorer's own ids.
      images: in place of the row's own.
      seen_by: other prompts for single teachers of a router, by name; None is: that teacher has nothing to look at.
    """

    prompt_ids: tuple[int, ...]
    images: tuple[Any, ...] | None = None
    seen_by: Mapping[str, "ContextPrompt | None"] = field(default_factory=dict)


Context = Callable[[Sequence[Rollout], Sequence[Rollout]], Sequence[ContextPrompt | None]]
"""Builds the prompts of one view from own rows and everyone's; one per own row, None for a row without such a view."""


def unchanged(own: Sequence[Rollout], everyone: Sequence[Rollout]) -> Sequence[ContextPrompt | None]:
    """The student's own prompt."""
    return [ContextPrompt(prompt_ids=rollout.prompt_ids) for rollout in own]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Who scores a view, and under which prompt."""

    teacher: Teacher
    context: Context = unchanged


@dataclass(frozen=True, kw_only=True)
class StudentMeasures:
    """What the student's own forward over the rollouts gave; None is: not asked for."""

    logprob_BT: Float[Tensor, "B T"]
    entropy_BT: Float[Tensor, "B T"] | None = None
    reverse_kl_BT: Float[Tensor, "B T"] | None = None
    top: View | None = None
    teacher_top_BTK: Float[Tensor, "B T K"] | None = None


@dataclass(frozen=True)
class Plan:
    """What a run measures for its objective.

    Attributes:
      needs: measurements that some step or loss reads, beside the live student.
      divergences: divergences that the loss will need.
      top_k: size of the candidate support that is measured with the student; 0 for none.
    """

    needs: frozenset[str]
    divergences: tuple[Divergence, ...]
    top_k: int = 0

    @staticmethod
    def of(objective: Objective, candidates: int = 0) -> "Plan":
        """The plan of an objective; `candidates` is the top-k of a method whose signal is over candidates."""
        needs = frozenset().union(*(term.credit.needs for term in objective.terms))
        needs |= {f"scores.{term.loss.view}" for term in objective.terms if isinstance(term.loss, SCORED)}
        if any(term.kind == "sft" for term in objective.terms):
            needs |= {"demonstration"}
        on_student = [d.top_k for d in objective.divergences if d.support == "student"]
        if any(need.endswith(".top") for need in needs):
            on_student.append(candidates)
        plan = Plan(needs, objective.divergences, max(on_student, default=0))
        return replace(plan, top_k=max(plan.top_k, plan.measured_top_k))

    def recording(self) -> "Plan":
        """This plan, and what a record needs beside: the student's log-probs, and the reverse KL that a loss reads."""
        own = {"student_logprobs"} | ({"kl"} if any(d.kind == "reverse_kl" for d in self.divergences) else set())
        plan = replace(self, needs=self.needs | own)
        return replace(plan, top_k=max(plan.top_k, plan.measured_top_k))

    @property
    def measured_top_k(self) -> int:
        """Size of the support on which the reverse KL is measured before credit is assigned; 0 where it is not."""
        if "kl" not in self.needs:
            return 0
        return max((d.top_k for d in self.divergences if d.kind == "reverse_kl" and d.support != "full"), default=0)

    @property
    def support(self) -> Support:
        """Whose most likely tokens the candidates are that are measured with the student.

        Raises:
          ConfigError: terms whose reverse KL is measured want different ones.
        """
        if not self.measured_top_k:
            return "student"
        reverse = [d for d in self.divergences if d.kind == "reverse_kl" and d.support != "full"]
        chosen: list[Support] = sorted({d.support for d in reverse})
        if len(chosen) > 1:
            raise ConfigError(
                f"the reverse KL is measured on one support before credit is assigned, and the terms of this objective "
                f"want {' and '.join(chosen)}; give them the same support"
            )
        return chosen[0]

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the scored views, without the student's own."""
        names = {need.split(".")[1] for need in self.needs if need.startswith("scores.")}
        return tuple(sorted(names - {"student"}))

    @property
    def sampled_views(self) -> tuple[str, ...]:
        """The views of which sampled log-probs are all that is read."""
        more = self.distribution or self.top_k or self.teacher_top_k
        return tuple(name for name in self.views if name != self.distribution_view or not more)

    @property
    def distribution_view(self) -> str:
        """The view whose distributions the divergences read.

        Raises:
          ConfigError: they read more than one.
        """
        names = sorted({d.view for d in self.divergences}) or ["teacher"]
        if len(names) > 1:
            raise ConfigError(
                f"a run measures the distributions of one scorer, and the terms of this objective want those of "
                f"{' and '.join(names)}; take one of them out, or let both read the same"
            )
        return names[0]

    @property
    def teacher_top_k(self) -> int:
        """Size of the teacher's own top-k support; 0 for none."""
        if self.support != "student":
            return 0
        return max((d.top_k for d in self.divergences if d.support == "teacher"), default=0)

    @property
    def needs_full(self) -> bool:
        """Whether nothing but the teacher's full distribution will do."""
        return any(d.support == "full" for d in self.divergences)

    @property
    def distribution(self) -> bool:
        """Whether the teacher's full distribution is of use."""
        return self.needs_full or "kl" in self.needs

    @property
    def student(self) -> bool:
        """Whether the student must be run over its rollouts before credit is assigned."""
        return bool({"student_logprobs", "entropies", "kl"} & self.needs) or self.top_k > 0


SCORED = (Divergence, SampledDivergence)
"""Losses that read a scorer's view."""


def row_of(rollout: Rollout, prompt: ContextPrompt) -> Row:
    """A response under a prompt, in the form that a teacher takes."""
    return Row(
        prompt_ids=tuple(prompt.prompt_ids),
        completion_ids=rollout.completion_ids,
        images=rollout.images if prompt.images is None else prompt.images,
        labels=tuple((key, str(value)) for key, value in rollout.columns.items() if isinstance(value, str | int)),
        seen_by=tuple((name, None if own is None else row_of(rollout, own)) for name, own in prompt.seen_by.items()),
    )


def ask(scorer: Scorer, own: Sequence[Rollout], everyone: Sequence[Rollout], want: Want, width: int) -> TeacherScores:
    """The scores of `asked`, at once."""
    return asked(scorer, own, everyone, want, width)()


def asked(
    scorer: Scorer, own: Sequence[Rollout], everyone: Sequence[Rollout], want: Want, width: int
) -> Callable[[], TeacherScores]:
    """Scores the rows that have a prompt under the scorer's context; the others come back as not valid.

    A teacher elsewhere (`is_remote`) is asked now and works until its scores are fetched; one of this process scores
    then.

    Args:
      scorer: teacher and context.
      own: rows of this process.
      everyone: rows of all processes, for contexts that need siblings.
      want: what beside sampled log-probs.
      width: T of the result.

    Returns:
      What gives the scores; it raises what the teacher raises.
    """
    prompts = scorer.context(own, everyone)
    picked = [index for index, prompt in enumerate(prompts) if prompt is not None]
    rows = [row_of(own[index], prompt) for index, prompt in enumerate(prompts) if prompt is not None]
    if not rows and not hasattr(scorer.teacher, "is_collective"):
        return lambda: nothing_scored(len(own), width, want)
    wanted = want if want.candidates_BTK is None else replace(want, candidates_BTK=want.candidates_BTK[picked])
    if not getattr(scorer.teacher, "is_remote", False):
        return lambda: scorer.teacher.score(rows, wanted).placed(picked, len(own), width)
    thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")
    future = thread.submit(scorer.teacher.score, rows, wanted)
    thread.shutdown(wait=False)
    return lambda: future.result().placed(picked, len(own), width)


def nothing_scored(num_rows: int, width: int, want: Want) -> TeacherScores:
    """Scores of rows that nobody was asked about, of the same form as those of the processes that asked."""
    logprob_BT = torch.zeros(num_rows, width)
    num_top = want.top_k if want.candidates_BTK is None else want.candidates_BTK.shape[2]
    shape = (num_rows, width, num_top)
    return TeacherScores(
        logprob_BT=logprob_BT,
        valid_BT=logprob_BT.bool(),
        top_ids_BTK=torch.full(shape, -1) if num_top else None,
        top_logprob_BTK=torch.full(shape, -torch.inf) if num_top else None,
    )


def score_views(
    plan: Plan, scorers: Mapping[str, Scorer], own: Sequence[Rollout], everyone: Sequence[Rollout], width: int
) -> dict[str, TeacherScores]:
    """The views that the plan reads with more than sampled log-probs, with distributions where they can be had.

    Raises:
      TeacherCannot: a full distribution is needed, and the teacher's transport delivers none.
    """
    scored = {}
    for name in plan.views:
        if name in plan.sampled_views:
            continue
        want = Want(distribution=plan.distribution or plan.top_k > 0, top_k=plan.teacher_top_k)
        try:
            scored[name] = ask(scorers[name], own, everyone, want, width)
        except TeacherCannot:
            if plan.needs_full:
                raise
            scored[name] = ask(scorers[name], own, everyone, Want(top_k=plan.teacher_top_k), width)
    return scored


def score_candidates(
    scorer: Scorer, own: Sequence[Rollout], everyone: Sequence[Rollout], top: View, width: int
) -> TeacherScores:
    """The teacher's log-probs of the student's own candidates."""
    return ask(scorer, own, everyone, Want(candidates_BTK=top.top_ids_BTK), width)


def head_of(scorer: Scorer) -> Callable[[Tensor], Tensor] | None:
    """The head that makes distributions of a teacher's hidden states; asked for with a sequence of one token."""
    row = Row(prompt_ids=(0,), completion_ids=(0,))
    return scorer.teacher.score([row], Want(distribution=True)).head


def demonstrations(own: Sequence[Rollout], encode: Callable[[str], Sequence[int]]) -> Demonstration:
    """The data set's `demonstration` column (text, ids, or null) as padded ids.

    Raises:
      MissingMeasurement: the data set has no such column.
    """
    rows: list[Sequence[int]] = []
    for rollout in own:
        if "demonstration" not in rollout.columns:
            raise MissingMeasurement(
                "the method needs demonstration, a column with a correct teacher text per prompt (null where there is "
                "none); make it with `hybrid teacher demonstrate`, or set the method to train without it"
            )
        value = rollout.columns["demonstration"]
        rows.append([] if value is None else encode(value) if isinstance(value, str) else list(value))
    width = max(1, *(len(row) for row in rows)) if rows else 1
    ids_BU = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BU = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids_BU[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask_BU[index, : len(row)] = True
    return Demonstration(ids_BU=ids_BU, mask_BU=mask_BU)


def teacher_accuracies(own: Sequence[Rollout]) -> Float[Tensor, " B"]:
    """The data set's `teacher_accuracy` column.

    Raises:
      MissingMeasurement: the data set has no such column, or a value outside [0, 1].
    """
    values = []
    for rollout in own:
        value = rollout.columns.get("teacher_accuracy")
        if value is None:
            raise MissingMeasurement(
                "the method needs teacher_accuracy, a column with the share of the teacher's own right answers per "
                "prompt; make it with `hybrid teacher demonstrate`"
            )
        if not 0 <= float(value) <= 1:
            raise DataError(f"teacher_accuracy must be in [0, 1]; got {value} for prompt {rollout.prompt!r}")
        values.append(float(value))
    return torch.tensor(values)


def to_view(scores: TeacherScores, mask_BT: Bool[Tensor, "B T"]) -> View:
    """A teacher's scores as a view of the batch."""
    device = mask_BT.device
    top_ids, top_logprob = scores.top_ids_BTK, scores.top_logprob_BTK
    return View(
        logprob_BT=scores.logprob_BT.to(device),
        valid_BT=scores.valid_BT.to(device) & mask_BT,
        top_ids_BTK=None if top_ids is None else top_ids.to(device),
        top_logprob_BTK=None if top_logprob is None else top_logprob.to(device),
    )


def join(
    *,
    plan: Plan,
    own: Sequence[Rollout],
    mask_BT: Bool[Tensor, "B T"],
    truncated_B: Bool[Tensor, " B"],
    scored: Mapping[str, TeacherScores],
    student: StudentMeasures | None,
    encode: Callable[[str], Sequence[int]],
    rewarded: bool,
    step: int,
    max_length: int | None,
) -> RolloutBatch:
    """One batch of everything that was measured about this process's rollouts."""
    device = mask_BT.device
    views = {name: to_view(scores, mask_BT) for name, scores in scored.items()}
    reverse_kl_BT = student.reverse_kl_BT if student else None
    if student and student.top is not None:
        views["student"] = student.top
        name = plan.distribution_view
        teacher_top_BTK = student.teacher_top_BTK
        if teacher_top_BTK is None:
            teacher_top_BTK = views[name].top_logprob_BTK
        if teacher_top_BTK is not None:
            views[name] = replace(views[name], top_ids_BTK=student.top.top_ids_BTK, top_logprob_BTK=teacher_top_BTK)
            if reverse_kl_BT is None and student.top.top_logprob_BTK is not None:
                reverse_kl_BT = coarse_reverse_kl(student.top.top_logprob_BTK, teacher_top_BTK).masked_fill(~mask_BT, 0)
    return RolloutBatch(
        group_B=torch.tensor([rollout.group for rollout in own], device=device),
        mask_BT=mask_BT,
        reward_B=torch.tensor([rollout.reward for rollout in own], device=device) if rewarded else None,
        truncated_B=truncated_B,
        student_logprob_BT=student.logprob_BT if student else None,
        entropy_BT=student.entropy_BT if student else None,
        reverse_kl_BT=reverse_kl_BT,
        teacher_accuracy_B=teacher_accuracies(own).to(device) if "teacher_accuracy" in plan.needs else None,
        views=views,
        demonstration=on_device(demonstrations(own, encode), device) if "demonstration" in plan.needs else None,
        step=step,
        max_length=max_length,
    )


def foreign_ids(scorers: Mapping[str, Scorer], student: Any) -> list[Finding]:
    """What to tell of teachers that are asked with the student's ids and whose own tokenizer is known here.

    Args:
      scorers: by view.
      student: its tokenizer.

    Raises:
      PreflightFailed: a teacher has another tokenizer, so it would score another text than the student wrote.
    """
    told = []
    for teacher in {id(scorer.teacher): scorer.teacher for scorer in scorers.values()}.values():
        if not isinstance(teacher, LocalTeacher) or teacher.tokenizer is None:
            continue
        findings = tokenizer_findings(student, teacher.tokenizer, template_declared=True)
        if any(finding.stops for finding in findings):
            raise PreflightFailed(teacher.name, findings)
        # BOS and PAD may differ where ids are handed over: neither stands in a response
        told += [finding for finding in findings if not finding.ok and "eos_token_id" in finding.detail]
    return told


def on_device(demonstration: Demonstration, device: torch.device) -> Demonstration:
    """The demonstrations on the device of the batch."""
    return Demonstration(ids_BU=demonstration.ids_BU.to(device), mask_BU=demonstration.mask_BU.to(device))


def scorers_of(
    teacher: Any, temperature: float, processor: Any = None, token_budget: int | None = None
) -> dict[str, Scorer]:
    """A teacher in any of the forms that `HybridTrainer` takes, as scorers by view.

    Args:
      teacher: see `HybridTrainer`.
      temperature: at which a model scores.
      processor: the student's, for a loaded model that reads images.
      token_budget: padded tokens of one forward of a model that is loaded or wrapped here.
    """
    if teacher is None:
        return {}
    if isinstance(teacher, Mapping):
        return dict(teacher)
    if isinstance(teacher, str | os.PathLike):
        teacher = LocalTeacher.load(Path(teacher), temperature=temperature, token_budget=token_budget)
    elif isinstance(teacher, torch.nn.Module):
        teacher = LocalTeacher(teacher, None, temperature=temperature, processor=processor, token_budget=token_budget)
    if not isinstance(teacher, Teacher):
        raise ConfigError(
            f"teacher must be a path, a model, a Teacher or a mapping of scorers; got {type(teacher).__name__}"
        )
    return {"teacher": Scorer(teacher=teacher)}
