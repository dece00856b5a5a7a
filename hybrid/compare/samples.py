"""The same prompts answered by several methods, token by token with their credit, out of the recorded rollouts."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hybrid.compare.load import RunData
from hybrid.errors import DataError
from hybrid.record_format import RecordLine

_MOST_BYTES = 64_000_000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response with its credit; the lists have one entry a token, `kl_weights` may be empty."""

    method: str
    seed: int
    task: str
    prompt: str
    step: int
    reward: float | None
    tokens: Sequence[str]
    advantages: Sequence[float]
    kl_weights: Sequence[float]
    kept: Sequence[bool]


def answers_side_by_side(runs: Sequence[RunData], *, num_prompts: int = 8, num_answers: int = 2) -> list[Answer]:
    """Picks prompts that as many methods as possible have answered, and for each method its latest answers to them.

    Args:
      runs: those with `rollouts*.jsonl` somewhere in their artifacts are read; of each task, those of one seed, the
        first that most methods have: matched seeds see the same prompts.
      num_prompts: at most so many of each task; those with answers of different reward and late ones first.
      num_answers: at most so many of each method and prompt: a right and a wrong one where there are both.

    Returns:
      Ordered by task, prompt and method; empty where no run has recorded any.

    Raises:
      DataError: a line is no record.
    """
    chosen = []
    for task in sorted({run.task for run in runs}):
        of_prompt: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
        for run, files in _recorded_of_one_seed([run for run in runs if run.task == task]):
            for answer in (answer for file in files for answer in read_answers(file, run)):
                of_prompt[answer.prompt][answer.method].append(answer)
        prompts = sorted(of_prompt, key=lambda prompt: _worth(of_prompt[prompt]), reverse=True)
        for prompt in prompts[:num_prompts]:
            for method in sorted(of_prompt[prompt]):
                chosen += _latest(of_prompt[prompt][method], num_answers)
    return chosen


def read_answers(file: Path, run: RunData) -> Iterator[Answer]:
    """Reads the lines of a record file that carry credit; of a very long file, its end.

    Raises:
      DataError: a line is no record (`record_format.RecordLine`), or its lists differ in length.
    """
    with file.open("rb") as lines:
        if (skipped := file.stat().st_size - _MOST_BYTES) > 0:
            lines.seek(skipped)
            lines.readline()  # the rest of a line
        for number, text in enumerate(lines, start=1):
            where = f"{file}, line {number}{' of its end' if skipped > 0 else ''}"
            try:
                line = RecordLine.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
            if line.advantages is not None:
                yield _answer(line, line.advantages, run, where)


def _answer(line: RecordLine, advantages: Sequence[float], run: RunData, where: str) -> Answer:
    tokens = line.tokens or [f"[{token}]" for token in line.token_ids]
    weights = line.kl_weights or []
    kept = line.kept or [bool(credit) for credit in advantages]
    if len({len(tokens), len(advantages), len(kept), len(weights) or len(tokens)}) > 1:
        lengths = f"{len(tokens)} tokens, {len(advantages)} advantages, {len(kept)} kept, {len(weights)} kl_weights"
        raise DataError(f"{where}: the lists differ in length: {lengths}")
    return Answer(
        method=run.method,
        seed=run.seed,
        task=run.task,
        prompt=line.prompt or f"prompt {line.prompt_id}",
        step=line.step or 0,
        reward=line.reward,
        tokens=tokens,
        advantages=advantages,
        kl_weights=weights,
        kept=[bool(one) for one in kept],
    )


def _recorded_of_one_seed(runs: Sequence[RunData]) -> list[tuple[RunData, list[Path]]]:
    found = [(run, sorted(run.artifacts.rglob("rollouts*.jsonl"))) for run in runs if run.artifacts is not None]
    found = [(run, files) for run, files in found if files]
    num_of_seed = Counter(run.seed for run, _ in found)
    best = min(num_of_seed, key=lambda seed: (-num_of_seed[seed], seed), default=None)
    return [(run, files) for run, files in found if run.seed == best]


def _worth(answers_of_method: dict[str, list[Answer]]) -> tuple[int, int, int]:
    """Methods that answered, different rewards (a prompt that is sometimes solved tells more), and the latest step."""
    answers = [answer for own in answers_of_method.values() for answer in own]
    return len(answers_of_method), len({answer.reward for answer in answers}), max(answer.step for answer in answers)


def _latest(answers: Sequence[Answer], num_answers: int) -> list[Answer]:
    """The latest answer of each reward, the highest reward first, filled up with the next latest."""
    newest = sorted(answers, key=lambda answer: -answer.step)
    of_reward = {answer.reward: answer for answer in reversed(newest)}
    different = sorted(of_reward.values(), key=lambda answer: -math.inf if answer.reward is None else answer.reward)[
        ::-1
    ]
    rest = [answer for answer in newest if all(answer is not one for one in different)]
    if len(different) > num_answers > 1:
        return [*different[: num_answers - 1], different[-1]]
    return [*different, *rest][:num_answers]
