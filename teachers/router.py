"""Several teachers behind one: each row to the teacher that a label names, or every row to all of them, with weights.

Shape letters as in `TeacherScores`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from teachers.errors import TeacherCannot, TeacherError
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.scores import TeacherScores

log = logging.getLogger(__name__)

Rule = Literal["log_mean", "mixture"]


class RoutedTeacher:
    """Asks for each row the teacher that one of its labels names.

    Every teacher is called each time, if need be with no rows: one that is sharded over ranks scores collectively, and
    a rank that has no row for it must take part. Its `stats` hold each teacher's rows and tokens, as "NAME/rows" and
    "NAME/tokens"; `parts` hold its log-probs, from which `teacher_gaps` makes its gap.
    """

    def __init__(
        self, teachers: Mapping[str, Teacher], column: str, default: str | None = None, *, name: str = "routed"
    ):
        """Asks nobody yet.

        Args:
          teachers: by the value of the label.
          column: the label that is looked at.
          default: the teacher of rows whose label is missing or names none; None makes such a row an error.
          name: for messages and metrics.

        Raises:
          TeacherError: there is no teacher, or `default` is none of them.
        """
        if not teachers:
            raise TeacherError(f"router {name!r} has no teachers")
        if default is not None and default not in teachers:
            raise TeacherError(f"default of router {name!r} is {default!r}, which is none of {', '.join(teachers)}")
        self.name = name
        self.teachers = dict(teachers)
        self.column = column
        self.default = default
        self._num_rows = dict.fromkeys(teachers, 0)

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores each row with its teacher; see `TeacherScores`.

        Raises:
          TeacherError: a row's label names no teacher, or the teachers' scores hold at different temperatures.
          TeacherCannot: a whole distribution is wanted, which different heads cannot give as one.
        """
        if want.distribution and len(self.teachers) > 1:
            raise TeacherCannot(
                f"router {self.name!r} has {len(self.teachers)} teachers with heads of their own, so it has no single "
                "distribution; use a method on sampled tokens, top_k or candidates"
            )
        seen = self.seen(rows)
        chosen = {name: list(own) for name, own in seen.items()}
        questions = [
            (teacher, list(seen[name].values()), _part_of(want, chosen[name]))
            for name, teacher in self.teachers.items()
        ]
        answers = dict(zip(self.teachers, _asked(questions), strict=True))
        for name, own in chosen.items():
            self._num_rows[name] += len(own)
        return _merged(rows, chosen, answers)

    def seen(self, rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
        """The rows that each teacher is asked about, as it sees them, by their place in `rows`.

        Raises:
          TeacherError: see `teacher_of`.
        """
        names = [self.teacher_of(i, row) for i, row in enumerate(rows)]
        return {
            name: {i: own for i, row in enumerate(rows) if names[i] == name and (own := row.seen(name)) is not None}
            for name in self.teachers
        }

    @property
    def inner_teachers(self) -> tuple[Teacher, ...]:
        """Those who are asked each time, in this order."""
        return tuple(self.teachers.values())

    @property
    def is_collective(self) -> bool:
        """Whether every rank must ask together, if need be for no rows."""
        return any(getattr(teacher, "is_collective", False) for teacher in self.inner_teachers)

    def teacher_of(self, index: int, row: Row) -> str:
        """The name of a row's teacher.

        Raises:
          TeacherError: the label names none and there is no default; the message names the row.
        """
        label = dict(row.labels).get(self.column)
        if label is not None and label in self.teachers:
            return label
        if self.default is not None:
            return self.default
        said = f"{self.column} is {label!r}" if label is not None else f"has no column {self.column!r}"
        raise TeacherError(
            f"row {index}: {said}, which names none of the teachers {', '.join(self.teachers)}; correct the data, add "
            "a teacher of that name, or set a default"
        )

    def unused(self) -> list[str]:
        """Teachers that no row has asked for yet."""
        return [name for name, count in self._num_rows.items() if not count]

    def close(self) -> None:
        """Closes all teachers, and reports those that never had a row."""
        for name in self.unused() if any(self._num_rows.values()) else ():
            log.warning(
                "teacher %s never had a row: no %s of the data was %r; look at the labels", name, self.column, name
            )
        for teacher in self.teachers.values():
            teacher.close()


class WeightedTeachers:
    """Asks all teachers for every row and combines what they say of the sampled tokens.

    With weights w, scaled to sum 1, and p_i of teacher i:

        log_mean:  sum_i w_i log p_i(y)        the gap to the student is the weighted mean of the teachers' gaps
        mixture:   log sum_i w_i p_i(y)        the log-prob of drawing a teacher first and then the token from it

    `mixture` is a distribution over tokens; `log_mean` is one up to a constant per position, and the default, for it is
    what adding the teachers' terms to one objective gives. A token counts where every teacher scored it, so a row in
    which one of them has nothing to look at is not asked about.
    """

    def __init__(self, teachers: Sequence[tuple[float, Teacher]], *, rule: Rule = "log_mean", name: str = "weighted"):
        """Asks nobody yet.

        Args:
          teachers: weights above 0, which are scaled to sum 1, and the teachers, whose names must differ.
          rule: "log_mean" or "mixture".
          name: for messages and metrics.

        Raises:
          TeacherError: a weight, the rule or a name is out of its range.
        """
        names = [teacher.name for _, teacher in teachers]
        if not teachers or len(set(names)) < len(names):
            raise TeacherError(f"{name!r} needs teachers with different names; got {names}")
        for weight, teacher in teachers:
            if not 0 < weight < math.inf:
                raise TeacherError(f"the weight of teacher {teacher.name!r} must be above 0 and finite; got {weight}")
        if rule not in ("log_mean", "mixture"):
            raise TeacherError(f"rule of {name!r} must be 'log_mean' or 'mixture'; got {rule!r}")
        self.name = name
        self.rule: Rule = rule
        total = sum(weight for weight, _ in teachers)
        self.teachers = {teacher.name: (weight / total, teacher) for weight, teacher in teachers}

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores the sampled tokens with all teachers; see `TeacherScores`.

        Raises:
          TeacherCannot: more than the sampled tokens is wanted.
          TeacherError: the teachers' scores hold at different temperatures.
        """
        if want.top_k or want.candidates_BTK is not None or want.distribution:
            raise TeacherCannot(
                f"weighted teachers {self.name!r} combine log-probs of sampled tokens alone: their supports differ. "
                "Use a method on sampled tokens, route each row to one teacher, or give each teacher a term of its own"
            )
        seen = self.seen(rows)
        questions = [(teacher, list(seen[name].values()), SAMPLED) for name, (_, teacher) in self.teachers.items()]
        answers = dict(zip(self.teachers, _asked(questions), strict=True))
        temperature = _one_temperature(answers)
        device = _device(answers)
        parts = {name: _with_nan(scores).to(device) for name, scores in answers.items()}
        weights = {name: weight for name, (weight, _) in self.teachers.items()}
        logprob_BT = combined(parts, weights, self.rule)
        valid_BT = ~logprob_BT.isnan()
        failures = {
            i: f"{name}: {reason}" for name, scores in answers.items() for i, reason in sorted(scores.failures.items())
        }
        scores = TeacherScores(
            logprob_BT=logprob_BT.nan_to_num(0.0),
            valid_BT=valid_BT,
            temperature=temperature,
            failures=failures,
            stats=_stats(answers),
            parts=parts,
        )
        picked = list(next(iter(seen.values())))
        return scores.placed(picked, len(rows), max((len(row.completion_ids) for row in rows), default=0))

    def seen(self, rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
        """The rows that every teacher is asked about, as each sees them, by their place in `rows`."""
        shown = {name: [row.seen(name) for row in rows] for name in self.teachers}
        blind = {i for own in shown.values() for i, row in enumerate(own) if row is None}
        return {
            name: {i: row for i, row in enumerate(own) if row is not None and i not in blind}
            for name, own in shown.items()
        }

    @property
    def inner_teachers(self) -> tuple[Teacher, ...]:
        """Those who are asked each time, in this order."""
        return tuple(teacher for _, teacher in self.teachers.values())

    @property
    def is_collective(self) -> bool:
        """Whether every rank must ask together, if need be for no rows."""
        return any(getattr(teacher, "is_collective", False) for teacher in self.inner_teachers)

    def close(self) -> None:
        """Closes all teachers."""
        for _, teacher in self.teachers.values():
            teacher.close()


def combined(
    parts: Mapping[str, Float[Tensor, "B T"]], weights: Mapping[str, float], rule: Rule
) -> Float[Tensor, "B T"]:
    """Several teachers' log-probs of the same tokens as one; see `WeightedTeachers` for the rules.

    Args:
      parts: log-probs in nats by teacher; nan where it gave none.
      weights: of the same teachers; sum 1.
      rule: "log_mean" or "mixture".

    Returns:
      The combined log-probs; nan where any teacher gave none.
    """
    log_NBT = torch.stack([*parts.values()])
    weight_N11 = log_NBT.new_tensor([weights[name] for name in parts])[:, None, None]
    if rule == "log_mean":
        return (weight_N11 * log_NBT).sum(0)
    return torch.logsumexp(weight_N11.log() + log_NBT, dim=0)


def teacher_gaps(scores: TeacherScores, student_logprob_BT: Float[Tensor, "B T"]) -> dict[str, tuple[float, int]]:
    """How far each of several teachers stands from the student on the tokens that it scored.

    Args:
      scores: with `parts`.
      student_logprob_BT: the student's log-probs of the same tokens, in nats.

    Returns:
      By teacher: the sum of teacher minus student in nats, and the number of tokens, so that ranks can be added up.
    """
    gaps: dict[str, tuple[float, int]] = {}
    for name, part_BT in scores.parts.items():
        gap_BT = part_BT - student_logprob_BT.to(part_BT.device)
        gaps[name] = (float(gap_BT.nansum()), int((~gap_BT.isnan()).sum()))
    return gaps


def _asked(questions: Sequence[tuple[Teacher, Sequence[Row], Want]]) -> list[TeacherScores]:
    # those that answer over the network are sent off first and work while the others compute here, in their order
    futures: dict[int, Future[TeacherScores]] = {}
    for i, (teacher, rows, want) in enumerate(questions):
        submit = getattr(teacher, "submit", None)
        if submit is not None:
            futures[i] = submit(rows, want)
    own = {i: teacher.score(rows, want) for i, (teacher, rows, want) in enumerate(questions) if i not in futures}
    return [own[i] if i in own else futures[i].result() for i in range(len(questions))]


def _part_of(want: Want, rows: Sequence[int]) -> Want:
    if want.candidates_BTK is None:
        return want
    return Want(top_k=want.top_k, candidates_BTK=want.candidates_BTK[list(rows)], distribution=want.distribution)


def _one_temperature(answers: Mapping[str, TeacherScores]) -> float:
    temperatures = {name: scores.temperature for name, scores in answers.items()}
    if len(set(temperatures.values())) > 1:
        raise TeacherError(f"the teachers' scores hold at different temperatures, {temperatures}; give them all one")
    return next(iter(temperatures.values()))


def _device(answers: Mapping[str, TeacherScores]) -> torch.device:
    devices = [scores.logprob_BT.device for scores in answers.values()]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _with_nan(scores: TeacherScores) -> Float[Tensor, "B T"]:
    return scores.logprob_BT.masked_fill(~scores.valid_BT, torch.nan)


def _stats(answers: Mapping[str, TeacherScores]) -> dict[str, float]:
    stats: dict[str, float] = {}
    for name, scores in answers.items():
        for key, value in scores.stats.items():
            stats[key] = stats.get(key, 0) + value
        stats[f"{name}/rows"] = len(scores.logprob_BT)
        stats[f"{name}/tokens"] = int(scores.valid_BT.sum())
    return stats


def _merged(
    rows: Sequence[Row], chosen: Mapping[str, Sequence[int]], answers: Mapping[str, TeacherScores]
) -> TeacherScores:
    """The answers in the order of `rows`."""
    device = _device(answers)
    shape = (len(rows), max((len(row.completion_ids) for row in rows), default=0))
    logprob_BT = torch.zeros(shape, device=device)
    valid_BT = torch.zeros(shape, dtype=torch.bool, device=device)
    supports = [scores.top_ids_BTK.shape[2] for scores in answers.values() if scores.top_ids_BTK is not None]
    ids_BTK = torch.full((*shape, max(supports, default=0)), -1, device=device)
    top_BTK = torch.full(ids_BTK.shape, -torch.inf, device=device)
    parts: dict[str, Tensor] = {}
    failures: dict[int, str] = {}
    for name, scores in answers.items():
        own, width = torch.tensor(chosen[name], dtype=torch.long, device=device), scores.logprob_BT.shape[1]
        logprob_BT[own, :width] = scores.logprob_BT.to(device, logprob_BT.dtype)
        valid_BT[own, :width] = scores.valid_BT.to(device)
        if scores.top_ids_BTK is not None and scores.top_logprob_BTK is not None:
            num_support = scores.top_ids_BTK.shape[2]
            ids_BTK[own, :width, :num_support] = scores.top_ids_BTK.to(device)
            top_BTK[own, :width, :num_support] = scores.top_logprob_BTK.to(device, top_BTK.dtype)
        parts[name] = torch.full(shape, torch.nan, device=device)
        parts[name][own, :width] = _with_nan(scores).to(device, logprob_BT.dtype)
        failures |= {chosen[name][i]: f"{name}: {reason}" for i, reason in scores.failures.items()}
    (only,) = answers.values() if len(answers) == 1 else (None,)
    return TeacherScores(
        logprob_BT=logprob_BT,
        valid_BT=valid_BT,
        temperature=_one_temperature(answers),
        top_ids_BTK=ids_BTK if supports else None,
        top_logprob_BTK=top_BTK if supports else None,
        hidden_BTH=None if only is None else only.hidden_BTH,
        head=None if only is None else only.head,
        failures=failures,
        stats=_stats(answers),
        parts=parts,
    )
