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
from hybrid.errors import ConfigError
from hybrid.objective.losses import Divergence, SampledDivergence
from hybrid.objective.objective import Objective
from hybrid.objective.step import Candidates, CandidateSupport
from hybrid.rollouts import Rollout, demonstrations, on_device, teacher_accuracies
from hybrid.types import RolloutBatch, View
from teachers.errors import TeacherCannot
from teachers.findings import Finding, PreflightFailed
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from teachers.scores import TeacherScores
from teachers.tokenizer_check import tokenizer_findings


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
      candidates: what the top-k signals look at.
    """

    needs: frozenset[str]
    divergences: tuple[Divergence, ...]
    candidates: frozenset[Candidates] = frozenset()

    @staticmethod
    def of(objective: Objective) -> "Plan":
        """The plan of an objective."""
        needs = frozenset().union(*(term.credit.needs for term in objective.terms))
        needs |= {f"scores.{term.loss.view}" for term in objective.terms if isinstance(term.loss, SCORED)}
        if any(term.kind == "sft" for term in objective.terms):
            needs |= {"demonstration"}
        return Plan(needs, objective.divergences, objective.candidates)

    def recording(self) -> "Plan":
        """This plan, and what a record needs beside: the student's log-probs, and what a divergence is made from."""
        own = {"student_logprobs"} | ({"kl"} if any(d.kind == "reverse_kl" for d in self.divergences) else set())
        return replace(self, needs=self.needs | own | ({"scores.student.top"} if self.coarse else set()))

    @property
    def coarse(self) -> tuple[Divergence, ...]:
        """The divergences on a top-k support."""
        return tuple(d for d in self.divergences if d.support != "full")

    @property
    def top_k(self) -> int:
        """Size of the top-k that is measured with the student before credit is assigned; 0 for none.

        A divergence on the teacher's own list can do without, unless credit or a record reads it.
        """
        reads, reads_kl = "scores.student.top" in self.needs, "kl" in self.needs
        measured = [d for d in self.coarse if d.support != "teacher" or reads or (reads_kl and d.kind == "reverse_kl")]
        return max([*(c.top_k for c in self.candidates), *(d.top_k for d in measured)], default=0)

    @property
    def support(self) -> CandidateSupport:
        """Whose most likely tokens are measured, for all terms that look at some.

        Raises:
          ConfigError: terms want different ones, or a divergence fewer of them than another term.
        """
        wanted: set[CandidateSupport] = {c.support for c in self.candidates}
        wanted.update(d.support for d in self.coarse if d.support != "full")
        if len(wanted) > 1:
            raise ConfigError(
                f"a run measures the most likely tokens of one support, and the terms of this objective want "
                f"{' and '.join(sorted(wanted))}; give them the same support"
            )
        sizes = {d.top_k for d in self.coarse} | {max((c.top_k for c in self.candidates), default=0)} - {0}
        if self.coarse and max(sizes) > min(d.top_k for d in self.coarse):
            raise ConfigError(
                "a divergence is measured on all the candidates of a run, and the terms of this objective want "
                f"top_k {' and '.join(map(str, sorted(sizes)))}; give them the same top_k"
            )
        return wanted.pop() if wanted else "student"

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the scored views, without the student's own."""
        names = {need.split(".")[1] for need in self.needs if need.startswith("scores.")}
        return tuple(sorted(names - {"student"}))

    @property
    def sampled_views(self) -> tuple[str, ...]:
        """The views of which sampled log-probs are all that is read."""
        more = self.distribution or self.teacher_top_k
        return tuple(name for name in self.views if name != self.distribution_view or not more)

    @property
    def distribution_view(self) -> str:
        """The view whose distributions the divergences, and whose candidates the signals, read.

        Raises:
          ConfigError: they read more than one.
        """
        names = sorted({d.view for d in self.divergences} | ({"teacher"} if self.candidates else set())) or ["teacher"]
        if len(names) > 1:
            raise ConfigError(
                f"a run measures the distributions of one scorer, and the terms of this objective want those of "
                f"{' and '.join(names)}; take one of them out, or let both read the same"
            )
        return names[0]

    @property
    def teacher_top_k(self) -> int:
        """Size of the list of its own likeliest tokens that the teacher gives; 0 for none."""
        if self.support not in ("teacher", "intersection"):
            return 0
        return max([*(c.top_k for c in self.candidates), *(d.top_k for d in self.coarse)], default=0)

    @property
    def needs_full(self) -> bool:
        """Whether nothing but the teacher's full distribution will do."""
        return any(d.support == "full" for d in self.divergences)

    @property
    def distribution(self) -> bool:
        """Whether the teacher's full distribution is of use."""
        return self.needs_full or (self.top_k > 0 and self.support in ("student", "union"))

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
        want = Want(distribution=plan.distribution, top_k=plan.teacher_top_k)
        try:
            scored[name] = ask(scorers[name], own, everyone, want, width)
        except TeacherCannot:
            if plan.needs_full or not plan.distribution:
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
    if student and student.top is not None and plan.support != "intersection":  # there each side has its own list
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
