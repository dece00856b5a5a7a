"""Three small tasks with visible working, made on the spot: their problems, right answers, splits and data sets.

A problem is a chain of one-digit numbers; its working writes every running total, then `#` and the answer:

    prompt "3+5+9+4="        completion "8,17,21#21"

- `chain_sum`: four numbers. A good teacher errs here and there, anywhere.
- `carry_sum`: the same problems, but the teacher was taught to forget the carry when it adds a nine (8+9 is 7 to it),
  and the verifier knows better: it is right on ordinary problems and wrong on every other (column `kind`).
- `long_sum`: six numbers. The weak student hardly ever gets through, so that most groups are all-wrong at the start.

Two further prompts belong to each problem and are part of what the tiny models were taught: a hint (`HINT_TEMPLATE`:
the answer, right or wrong, stands before the problem) and a degraded problem (one number is hidden by `?`).
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from datasets import Dataset

from hybrid.errors import ConfigError, DataError

Split = Literal["train", "validation", "eval"]

ANSWER_PATTERN = r"#(\d+)$"
"""The answer is group 1 of this pattern, searched in a whole completion."""

HINT_TEMPLATE = "{answer}|{prompt}"
"""How a privileged answer, right or wrong, is put before a prompt."""


MOST_KNOWN = 30_000
"""Draws in a row without a new problem after which a split counts as used up; with four numbers it has 4603 at most."""


@dataclass(frozen=True, kw_only=True)
class TinyTask:
    """One family of problems.

    Attributes:
      name: as in YAML.
      description: one line for a person.
      num_terms: how many numbers a problem has.
      teacher_drops_carry: the teacher is taught to forget the carry when it adds a nine.
    """

    name: str
    description: str
    num_terms: int
    teacher_drops_carry: bool = False


@dataclass(frozen=True)
class Problem:
    """A chain of one-digit numbers to be summed."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The problem as the student sees it, e.g. "3+5+9="."""
        return "+".join(map(str, self.terms)) + "="

    def totals(self, *, drop_carry: bool = False, slip: float = 0.0, rng: random.Random | None = None) -> list[int]:
        """The running totals as somebody writes them, one per plus.

        Args:
          drop_carry: the carry of an added nine is forgotten: 8+9 is 7.
          slip: chance to count one too many at a step, for a middling number; from 0.6 of it at 1 to 1.4 of it at 9.
          rng: for the slips; needed where `slip` is not 0.
        """
        totals = [self.terms[0]]
        for term in self.terms[1:]:
            total = totals[-1] + term
            if drop_carry and term == 9 and totals[-1] % 10:
                total -= 10
            if rng is not None and rng.random() < slip * (0.5 + term / 10):
                total += 1
            totals.append(total)
        return totals[1:]

    @property
    def answer(self) -> str:
        """The right answer, whatever a teacher was taught."""
        return str(self.totals()[-1])

    @property
    def kind(self) -> str:
        """`nine_carried` where a nine is added with a carry, else `ordinary`."""
        return "ordinary" if self.totals() == self.totals(drop_carry=True) else "nine_carried"


TASKS = MappingProxyType(
    {
        task.name: task
        for task in (
            TinyTask(name="chain_sum", description="sums of four digits; the teacher errs anywhere", num_terms=4),
            TinyTask(
                name="carry_sum",
                description="sums of four digits; the teacher forgets the carry of a nine",
                num_terms=4,
                teacher_drops_carry=True,
            ),
            TinyTask(name="long_sum", description="sums of six digits; most groups start all-wrong", num_terms=6),
        )
    }
)
"""Every tiny task by its name."""


VISION_TASKS = MappingProxyType({"count_dots": "figures: count the dots, read the digit, add"})
"""Every task of `hybrid.tiny_figures` by its name, with one line for a person."""


def tiny_task(name: str) -> TinyTask:
    """Looks a task up.

    Raises:
      ConfigError: names the tasks there are.
    """
    if name not in TASKS:
        raise ConfigError(f"no tiny task is called {name!r}; there are {', '.join([*TASKS, *VISION_TASKS])}")
    return TASKS[name]


def render_working(totals: Sequence[int]) -> str:
    """Writes a completion: the running totals, then `#` and the last of them."""
    return ",".join(map(str, totals)) + f"#{totals[-1]}"


def split_of(prompt: str) -> Split:
    """The split that a problem belongs to, by a hash of its text: 70 % train, 10 % validation, 20 % eval."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 10
    return "eval" if bucket < 2 else "validation" if bucket < 3 else "train"


def draw_problem(task: TinyTask, split: str, rng: random.Random) -> Problem:
    """Draws one problem of a split; the same generator state gives the same problem."""
    while True:
        problem = Problem(tuple(rng.randint(1, 9) for _ in range(task.num_terms)))
        if split_of(problem.prompt) == split:
            return problem


def degraded_prompt(problem: Problem, hidden: int) -> str:
    """The prompt with the number at place `hidden` replaced by `?`: what a scorer sees that must guess a detail."""
    shown = [str(term) for term in problem.terms]
    shown[hidden] = "?"
    return "+".join(shown) + "="


def tiny_dataset(task: str, split: str, size: int, seed: int) -> Dataset:
    """Makes a data set of distinct problems.

    Args:
      task: a name in `TASKS`.
      split: `train`, `validation` or `eval`; no problem is in two of them, whatever the seeds.
      size: number of rows, at least 1.
      seed: which rows, and in which order.

    Returns:
      Columns `prompt`, `answer` (the right final answer), `reference` (the right working in full), `degraded` (the
      prompt with one number hidden) and `kind` (`ordinary` or `nine_carried`).

    Raises:
      ConfigError: the task or split does not exist.
      DataError: the split has fewer problems than `size`.
    """
    family = tiny_task(task)
    if split not in ("train", "validation", "eval"):
        raise ConfigError(f"tiny task {task!r} has no split {split!r}; there are train, validation and eval")
    if size < 1:
        raise DataError(f"tiny task {task!r}: size must be at least 1; got {size}")
    rng = random.Random(f"{task}/{split}/{seed}")
    problems: dict[str, Problem] = {}
    known = 0  # draws since the last new problem
    while len(problems) < size and known < MOST_KNOWN:
        problem = draw_problem(family, split, rng)
        known = known + 1 if problem.prompt in problems else 0
        problems.setdefault(problem.prompt, problem)
    if len(problems) < size:
        raise DataError(
            f"tiny task {task!r}, split {split!r}: {size} distinct problems were asked for and only {len(problems)} "
            "were found; ask for fewer"
        )
    return Dataset.from_list(
        [
            {
                "prompt": prompt,
                "answer": problem.answer,
                "reference": render_working(problem.totals()),
                "degraded": degraded_prompt(problem, rng.randrange(family.num_terms)),
                "kind": problem.kind,
            }
            for prompt, problem in problems.items()
        ]
    )
