"""KAT's online stop: a response ends where its trap fires, while it is being written (arXiv 2606.09471).

Token by token where the student generates in this process: the teacher reads along with its own cache, so that a token
costs one more forward of one token. In chunks where an engine generates, or where a chunk size is set: after each chunk
the responses that still run are measured as whole responses are. The chunks are shown by tests with generation in this
process; with vLLM they take the same way, which needs a GPU and is not part of the tests.

A stopped response ends without an end token. What is kept of it is then decided by the same gate as ever, so that a
record of it explains itself.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hybrid.collect import Scorer, unchanged
from hybrid.distributions import reverse_kl_of_logits
from hybrid.errors import ConfigError
from hybrid.objective.kl_trap import (
    ENGINE_CHUNK,
    OnlineStop,
    TrapState,
    online_stop,
    sampled_divergence,
    token_divergence,
)
from hybrid.rollouts import Rollout
from teachers.local import LocalTeacher
from teachers.protocol import Row

Written = tuple[list[list[int]], list[list[float]] | None]
"""Completions, and where an engine gives them the log-probs that it sampled with."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What decides whether a run can stop its responses online.

    Attributes:
      args: TRL's.
      rewarded: whether a reward judges the responses.
      zero_stage: of DeepSpeed; 0 for none.
      tools: whether responses call tools.
      pictures: whether the student reads pictures.
    """

    args: Any
    rewarded: bool
    zero_stage: int = 0
    tools: bool = False
    pictures: bool = False


def chosen_stop(stop: OnlineStop | None, scorers: Mapping[str, Scorer], run: RunFacts) -> OnlineStop | None:
    """The method's online stop where this run can have it.

    Raises:
      ConfigError: the stop is required, and cannot be had.
    """
    if stop is None:
        return None
    reason = hindrance(stop, scorers, run)
    if reason is not None and stop.required:
        raise ConfigError(
            f"online: true cannot be had: {reason}; leave online at auto, which then masks complete responses"
        )
    return stop if reason is None else None


def hindrance(stop: OnlineStop, scorers: Mapping[str, Scorer], run: RunFacts) -> str | None:
    """Why a run cannot stop its responses online; None where it can."""
    scorer, args = scorers.get("teacher"), run.args
    if run.rewarded:
        return "the run has a reward, and a response that is cut has no answer to be judged"
    if run.tools:
        return "responses call tools, between which they are written in pieces"
    if args.mask_truncated_completions:
        return "mask_truncated_completions leaves out every response that was stopped"
    if stop.divergence is not None and stop.divergence.support not in ("student", "full"):
        return f"the support is {stop.divergence.support}, and only student and full can be measured token by token"
    if scorer is None or not isinstance(scorer.teacher, LocalTeacher):
        kind = "missing" if scorer is None else f"a {type(scorer.teacher).__name__}"
        return f"the teacher is {kind}, and only a local model reads along"
    if scorer.context is not unchanged:
        return "the teacher sees another prompt than the student, which needs the finished responses"
    if run.zero_stage == 3:
        return "ZeRO-3 spreads the teacher over processes that write at their own pace"
    if chunk_of(stop, args) and args.world_size > 1:
        return "chunks are written by one training process alone"
    if chunk_of(stop, args) and run.pictures:
        return (
            "the student reads pictures, and then only a look at every token (online_chunk: 0) without an engine works"
        )
    return None


def chunk_of(stop: OnlineStop, args: Any) -> int:
    """Tokens between two looks; 0 is every token."""
    engine = args.use_vllm or args.use_transformers_continuous_batching
    return stop.chunk or (ENGINE_CHUNK if engine else 0)


class TokenStop(StoppingCriteria):
    """Looks at every token of every response, and says which responses end."""

    def __init__(
        self,
        stop: OnlineStop,
        threshold: float,
        teacher: LocalTeacher,
        rows: Sequence[Row],
        *,
        temperature: float,
        ends: frozenset[int],
    ) -> None:
        """Takes what it needs; the teacher reads the prompts with the first token.

        Args:
          stop: the method's.
          threshold: of this batch.
          teacher: reads along.
          rows: prompts with their pictures; completions are not looked at.
          temperature: of the sampler.
          ends: ids that end a response.
        """
        self.stop, self.threshold, self.temperature, self.ends = stop, threshold, temperature, ends
        self.rows, self.teacher, self.reader = rows, teacher, teacher.alongside()
        self.states = [TrapState() for _ in rows]
        self.lengths: list[int | None] = [None] * len(rows)
        self._finished = [False] * len(rows)
        self._student_RV: Tensor | None = None
        self._last_R: Tensor | None = None

    def hear(self, module: Any, args: Any, output: Any) -> None:
        """Overhears the student's logits, before any processor of `generate` changes them."""
        self._student_RV = output.logits[:, -1]

    def __call__(self, input_ids: Int[Tensor, "R L"], scores: Any, **_: Any) -> Bool[Tensor, " R"]:
        """Called by `generate` after each token; True for a row that ends here."""
        assert self._student_RV is not None, "generate() calls the model before its stopping criteria"
        teacher_RV = self.reader.begin(self.rows) if self._last_R is None else self.reader.follow(self._last_R)
        self._last_R = input_ids[:, -1]
        value_R = self._divergence(self._student_RV, teacher_RV.to(input_ids.device), self._last_R)
        for row, (value, token) in enumerate(zip(value_R.tolist(), self._last_R.tolist(), strict=True)):
            if self._finished[row]:
                continue
            self.states[row], fired = online_stop(
                self.states[row], value, trap=self.stop.trap, threshold=self.threshold
            )
            if fired:
                self.lengths[row] = self.states[row].num_tokens
            self._finished[row] = fired or token in self.ends
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)

    def _divergence(
        self, student_RV: Float[Tensor, "R V"], teacher_RV: Float[Tensor, "R W"], token_R: Int[Tensor, " R"]
    ) -> Float[Tensor, " R"]:
        if self.stop.divergence is not None:
            return reverse_kl_of_logits(student_RV, teacher_RV, self.stop.divergence, self.temperature)
        ours_R = torch.log_softmax(student_RV.float() / self.temperature, -1).gather(1, token_R[:, None])[:, 0]
        at = self.teacher.settings.temperature
        theirs_R = torch.log_softmax(teacher_RV / at, -1).gather(1, token_R[:, None])[:, 0]
        return sampled_divergence(theirs_R - ours_R, self.stop.estimator)

    def cut(self, written: Written) -> Written:
        """The completions as far as they were written; `generate` has filled the rest of a stopped row up."""
        completions, logprobs = written
        completions = [ids if n is None else ids[:n] for ids, n in zip(completions, self.lengths, strict=True)]
        return completions, logprobs


@contextmanager
def listening(model: Any, watcher: TokenStop) -> Iterator[None]:
    """Lets `model.generate` end rows as the watcher says; afterwards the model is as before."""
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    handle = core.register_forward_hook(watcher.hear)
    model.generate = functools.partial(model.generate, stopping_criteria=StoppingCriteriaList([watcher]))
    try:
        yield
    finally:
        handle.remove()
        del model.generate


@dataclass(frozen=True, kw_only=True)
class ChunkStop:
    """Looks at responses after every chunk.

    Attributes:
      stop: the method's.
      threshold: of this batch.
      chunk: tokens between two looks.
      ends: ids that end a response.
      write: writes at most so many further tokens to each of some rows, given by number, behind what they have.
      measure: divergence of each token of some rows.
    """

    stop: OnlineStop
    threshold: float
    chunk: int
    ends: frozenset[int]
    write: Callable[[Sequence[int], Sequence[Sequence[int]], int], Written]
    measure: Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[Sequence[float]]]

    def run(self, num_rows: int, most: int) -> tuple[Written, int]:
        """Writes all rows, at most `most` tokens each; also tells how many rows it stopped."""
        completions: list[list[int]] = [[] for _ in range(num_rows)]
        logprobs: list[list[float]] | None = [[] for _ in range(num_rows)]
        states = [TrapState() for _ in range(num_rows)]
        running, stopped, done = list(range(num_rows)), 0, 0
        while running and done < most:
            limit = min(self.chunk, most - done)
            new_ids, new_logprobs = self.write(running, [completions[row] for row in running], limit)
            logprobs = None if new_logprobs is None else logprobs
            for place, row in enumerate(running):
                completions[row] += new_ids[place]
                if logprobs is not None and new_logprobs is not None:
                    logprobs[row] += new_logprobs[place]
            values = self.measure(running, [completions[row] for row in running])
            going = []
            for row, value_T in zip(running, values, strict=True):
                states[row] = self._through(states[row], value_T)
                fired = states[row].cut is not None
                if fired:
                    completions[row] = completions[row][: states[row].num_tokens]
                    stopped += 1
                elif completions[row][-1] not in self.ends:
                    going.append(row)
            running, done = going, done + limit
        if logprobs is not None:
            logprobs = [values[: len(ids)] for values, ids in zip(logprobs, completions, strict=True)]
        return (completions, logprobs), stopped

    def _through(self, state: TrapState, value_T: Sequence[float]) -> TrapState:
        """The state after the tokens that it has not seen."""
        for value in value_T[state.num_tokens :]:
            state, fired = online_stop(state, value, trap=self.stop.trap, threshold=self.threshold)
            if fired:
                break
        return state


def write_online(
    trainer: Any,
    stop: OnlineStop,
    threshold: float,
    write: Callable[..., Written],
    prompts: Sequence[Sequence[int]],
    pictures: Sequence[Sequence[Any] | None] | None,
    others: Sequence[Any],
) -> tuple[Written, int]:
    """One batch of responses, each ended where its trap fires; also tells how many ended so.

    Args:
      trainer: a `HybridTrainer`.
      stop: chosen for its run.
      threshold: of this batch, above -inf.
      write: TRL's `_generate_single_turn`.
      prompts: ids.
      pictures: of each prompt.
      others: further arguments of `write`.
    """
    ends, chunk = frozenset(trainer.eos_token_ids), chunk_of(stop, trainer.args)
    if not chunk:
        shown = pictures or [None] * len(prompts)
        rows = [
            Row(prompt_ids=tuple(ids), completion_ids=(), images=tuple(images or ()))
            for ids, images in zip(prompts, shown, strict=True)
        ]
        teacher, temperature = trainer.scorers["teacher"].teacher, trainer.temperature
        watcher = TokenStop(stop, threshold, teacher, rows, temperature=temperature, ends=ends)
        with listening(trainer.accelerator.unwrap_model(trainer.model_wrapped), watcher):
            written = write(prompts, pictures, *others)
        return watcher.cut(written), sum(length is not None for length in watcher.lengths)

    def further(rows: Sequence[int], so_far: Sequence[Sequence[int]], limit: int) -> Written:
        begun = [[*prompts[row], *ids] for row, ids in zip(rows, so_far, strict=True)]
        with at_most(trainer, limit):
            return write(begun, None, {}, 1)

    def measure(rows: Sequence[int], so_far: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        own = [
            Rollout(
                prompt=None,
                prompt_ids=tuple(prompts[row]),
                completion_ids=tuple(ids),
                text="",
                group=row,
                position=0,
                reward=math.nan,
            )
            for row, ids in zip(rows, so_far, strict=True)
        ]
        batch, _ = trainer.measure_rollouts(own)
        value_BT = token_divergence(batch, stop.estimator)
        return [value_T[: len(ids)].tolist() for value_T, ids in zip(value_BT.double(), so_far, strict=True)]

    chunks = ChunkStop(stop=stop, threshold=threshold, chunk=chunk, ends=ends, write=further, measure=measure)
    return chunks.run(len(prompts), trainer.max_completion_length)


@contextmanager
def at_most(trainer: Any, limit: int) -> Iterator[None]:
    """Lets TRL's generation write at most so many tokens."""
    engine = trainer.use_vllm
    place, name = (
        (trainer.vllm_generation, "max_completion_length") if engine else (trainer.generation_config, "max_new_tokens")
    )
    before = getattr(place, name)
    setattr(place, name, limit)
    try:
        yield
    finally:
        setattr(place, name, before)


def as_batch(own: Sequence[Rollout], pad_id: int, device: Any) -> dict[str, Tensor]:
    """Rollouts as the tensors of TRL's batch: prompts padded on the left, completions on the right."""
    left, right = max(len(r.prompt_ids) for r in own), max(len(r.completion_ids) for r in own)

    def tensor(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=device)

    return {
        "prompt_ids": tensor([[pad_id] * (left - len(r.prompt_ids)) + list(r.prompt_ids) for r in own]),
        "prompt_mask": tensor([[0] * (left - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in own]),
        "completion_ids": tensor([list(r.completion_ids) + [pad_id] * (right - len(r.completion_ids)) for r in own]),
        "completion_mask": tensor([[1] * len(r.completion_ids) + [0] * (right - len(r.completion_ids)) for r in own]),
    }
