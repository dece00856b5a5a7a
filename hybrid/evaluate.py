"""Accuracy on held-out prompts: avg@k and pass@k of sampled responses, deterministic under a seed.

Shape letters: P prompts, K responses per prompt.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from datasets import Dataset
from jaxtyping import Bool, Float, Int

from hybrid.compare.statistics import avg_at_k, mean_with_interval, pass_at_k
from hybrid.errors import DataError, RewardError
from hybrid.pictures import encode_prompts, tokenizer_of
from hybrid.together import from_all, from_main, num_processes, rank
from hybrid.whole_file import write_whole

Report = Callable[[int, int], None]
"""Told how many responses are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How held-out responses are drawn.

    Attributes:
      samples: K.
      max_completion_length: most tokens of a response.
      temperature: 0 is greedy.
      top_p: nucleus.
      batch_size: responses generated at once.
      seed: of the sampler; with the same batch size the same seed gives the same responses of the same model.
      success_at: a weighted reward of at least this is a right answer.
    """

    samples: int = 4
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 64
    seed: int = 0
    success_at: float = 1.0


ARRAYS = {"reward_PK": float, "right_PK": bool, "length_PK": int, "truncated_PK": bool}
"""What is kept of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came out, response by response.

    Attributes:
      reward_PK: weighted sum of the rewards; NaN is unscored.
      right_PK: whether it reaches `success_at`; an unscored response is not right.
      length_PK: tokens of the response, the end token included.
      truncated_PK: whether it hit the length limit.
      texts: the responses.
      sampling: how they were drawn.
    """

    reward_PK: Float[np.ndarray, "P K"]
    right_PK: Bool[np.ndarray, "P K"]
    length_PK: Int[np.ndarray, "P K"]
    truncated_PK: Bool[np.ndarray, "P K"]
    texts: Sequence[Sequence[str]]
    sampling: Sampling

    def shares(self) -> dict[str, Float[np.ndarray, " P"]]:
        """avg@K and every pass@k of each prompt, by metric name."""
        num = self.right_PK.shape[1]
        correct_P = self.right_PK.sum(1)
        average_P = avg_at_k(np.full_like(correct_P, num), correct_P, num)
        return {f"eval/avg_at_{num}": average_P, **{f"eval/pass_at_{k}": v for k, v in self.passes().items()}}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of the means, over prompts as a sample of all such prompts."""
        found = {name: mean_with_interval(value_P) for name, value_P in self.shares().items()}
        return {name: (estimate.low, estimate.high) for name, estimate in found.items()}

    def passes(self) -> dict[int, Float[np.ndarray, " P"]]:
        """K -> the unbiased estimate of pass@k of each prompt, for k = 1, 2, 4, ... up to K."""
        num = self.right_PK.shape[1]
        ks = sorted({*(2**i for i in range(num.bit_length()) if 2**i <= num), num})
        correct_P = self.right_PK.sum(1)
        return {k: pass_at_k(np.full_like(correct_P, num), correct_P, k) for k in ks}

    def metrics(self) -> dict[str, float]:
        """Means over prompts, under the names that runs are compared by."""
        named = {name: float(value_P.mean()) for name, value_P in self.shares().items()}
        named["eval/reward"] = float(np.nanmean(self.reward_PK)) if not np.isnan(self.reward_PK).all() else float("nan")
        named["eval/unscored"] = float(np.isnan(self.reward_PK).mean())
        named["eval/response_length"] = float(self.length_PK.mean())
        named["eval/truncated"] = float(self.truncated_PK.mean())
        return named


def write_evaluation(path: Path, found: Evaluation) -> None:
    """Keeps an evaluation without its texts as JSON."""
    arrays = {name: getattr(found, name).tolist() for name in ARRAYS}
    write_whole(path, orjson.dumps({"sampling": found.sampling.__dict__, **arrays}))


def read_evaluation(path: Path) -> Evaluation | None:
    """What `write_evaluation` kept; None where there is no such file, or one that a kill has torn."""
    try:
        kept = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    sampling = Sampling(**kept.pop("sampling"))
    kept["reward_PK"] = [[math.nan if value is None else value for value in row] for row in kept["reward_PK"]]
    arrays: dict[str, Any] = {name: np.array(values, dtype=ARRAYS[name]) for name, values in kept.items()}
    return Evaluation(texts=(), sampling=sampling, **arrays)


def evaluate(
    model: Any,
    tokenizer: Any,
    prompts: Dataset,
    rewards: Sequence[Any],
    sampling: Sampling,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    report: Report | None = None,
) -> Evaluation:
    """Samples K responses to each prompt and scores them.

    The random state of the process is left as it was. Where several processes train, all of them call this; the rewards
    run on rank 0.

    Args:
      model: a causal language model with `generate`.
      tokenizer: its tokenizer; its processor, where rows have pictures.
      prompts: rows with `prompt` and the rewards' columns.
      rewards: reward functions with a `weight`.
      sampling: how to draw.
      chat_template_kwargs: for chat prompts.
      report: progress.

    Raises:
      DataError: no prompts.
      RewardError: a reward fails.
    """
    if len(prompts) == 0:
        raise DataError("the held-out set is empty; evaluate.prompts or evaluate.data must leave at least one prompt")
    rows = [dict(row) for row in prompts for _ in range(sampling.samples)]  # pyright: ignore[reportArgumentType, reportCallIssue]
    was_training = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        completions = generated(model, tokenizer, rows, sampling, chat_template_kwargs or {}, report)
    model.train(was_training)
    ends = end_tokens(model, tokenizer_of(tokenizer))
    return from_main(lambda: scored(rows, completions, tokenizer, rewards, sampling, ends))


def generated(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    chat_template_kwargs: Mapping[str, Any],
    report: Report | None,
) -> list[list[int]]:
    """The responses to all rows; the processes share the batches, and each batch has a seed of its own.

    So the responses do not depend on how many processes there are.
    """
    starts = range(0, len(rows), sampling.batch_size)
    own: dict[int, list[list[int]]] = {}
    for turn in range(0, len(starts), num_processes()):
        place = turn + rank()
        # a process without a batch left repeats the last one: under ZeRO-3 all processes generate in step
        start = starts[min(place, len(starts) - 1)]
        torch.manual_seed(sampling.seed + start)
        batch = rows[start : start + sampling.batch_size]
        own[start] = generate(model, tokenizer, batch, sampling, chat_template_kwargs)
        if report is not None:
            report(min((turn + num_processes()) * sampling.batch_size, len(rows)), len(rows))
    found = {start: batch for part in from_all(own) for start, batch in part.items()}
    return [ids for start in starts for ids in found[start]]


def generate(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    chat_template_kwargs: Mapping[str, Any],
) -> list[list[int]]:
    """One batch of responses as ids, cut behind the first end token."""
    encoded = encode_prompts(tokenizer, rows, chat_template_kwargs)
    inputs = {key: value.to(model.device) for key, value in encoded.items() if key != "token_type_ids"}
    sample = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    out = model.generate(
        **inputs,
        max_new_tokens=sampling.max_completion_length,
        pad_token_id=tokenizer_of(tokenizer).pad_token_id,
        **(sample if sampling.temperature > 0 else {"do_sample": False}),
    )
    ends = end_tokens(model, tokenizer_of(tokenizer))
    return [cut_behind(ids, ends) for ids in out[:, inputs["input_ids"].shape[1] :].tolist()]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: a model may have several."""
    config = getattr(model, "generation_config", None)
    value = getattr(config, "eos_token_id", None)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return frozenset({*listed, tokenizer.eos_token_id} - {None})


def cut_behind(ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    """The ids up to and with the first end token."""
    for place, token in enumerate(ids):
        if token in ends:
            return list(ids[: place + 1])
    return list(ids)


def scored(
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[Sequence[int]],
    tokenizer: Any,
    rewards: Sequence[Any],
    sampling: Sampling,
    ends: frozenset[int] | None = None,
) -> Evaluation:
    """Responses as ids, with their rewards; `ends` are the ids that end one, else the tokenizer's."""
    ends = end_tokens(None, tokenizer_of(tokenizer)) if ends is None else ends
    return judged(
        rows,
        tokenizer.batch_decode(completions, skip_special_tokens=True),
        [list(ids) for ids in completions],
        [len(ids) for ids in completions],
        [len(ids) >= sampling.max_completion_length and not (ids and ids[-1] in ends) for ids in completions],
        rewards,
        sampling,
    )


def judged(
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    completions: Sequence[list[int]],
    num_tokens: Sequence[int],
    truncated: Sequence[bool],
    rewards: Sequence[Any],
    sampling: Sampling,
) -> Evaluation:
    """Rewards of all responses, put into P rows of K.

    Args:
      rows: the prompt of each response, with the rewards' columns.
      texts: the responses.
      completions: their ids, for rewards that read them.
      num_tokens: their lengths.
      truncated: which of them hit the limit.
      rewards: reward functions with a `weight`.
      sampling: how they were drawn.

    Raises:
      RewardError: there is no reward, or one fails.
    """
    if not rewards:
        raise RewardError("an evaluation needs a reward; name one under rewards, or write evaluate: null")
    shown = [
        t if isinstance(r["prompt"], str) else [{"role": "assistant", "content": t}]
        for r, t in zip(rows, texts, strict=True)
    ]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    total_N, known_N = np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
    for reward in rewards:
        values = reward(
            prompts=[row["prompt"] for row in rows],
            completions=shown,
            completion_ids=list(completions),
            **columns,
        )
        value_N = np.array([np.nan if value is None else float(value) for value in values])
        total_N += np.nan_to_num(value_N, nan=0.0) * getattr(reward, "weight", 1.0)
        known_N |= ~np.isnan(value_N)
    shape = (len(rows) // sampling.samples, sampling.samples)
    reward_PK = np.where(known_N, total_N, np.nan).reshape(shape)
    return Evaluation(
        reward_PK=reward_PK,
        right_PK=np.nan_to_num(reward_PK, nan=-np.inf) >= sampling.success_at,
        length_PK=np.array(num_tokens, dtype=int).reshape(shape),
        truncated_PK=np.array(truncated, dtype=bool).reshape(shape),
        texts=[texts[start : start + sampling.samples] for start in range(0, len(texts), sampling.samples)],
        sampling=sampling,
    )
