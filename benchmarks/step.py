"""What our trainer adds to a training step, side by side with TRL's `GRPOTrainer`, and what assigning credit costs.

    python -m benchmarks.step                 # both tables
    python -m benchmarks.step --only step     # or one: step, credit

**Step.** Four trainings take turns in one process, a step each, there and back (A B C D D C B A ...), so that what else
the machine does falls on all alike: stock TRL; our GRPO with TRL's output head, as on a GPU; our GRPO as it runs here;
and OPDVR with a local teacher of the student's size. All have the same student, prompts and responses, which are given
and not generated, so a step is rewards, scores, credit, loss, backward and update. A number is the ratio of the median
steps with a 95 % interval (bootstrap over rounds), in CPU seconds of the process, for wall time on a shared machine
tells more about its other users. That the work is equal is shown by the losses.

**Credit.** `Objective.assign` of every method on batches up to 512 x 4,096 tokens: seconds, the exponent of their
growth from the last size but one to the last, four times the tokens, and the share of a training step of as many
tokens. That step is the median step of our GRPO above, per token, times the tokens: a student of a few million weights,
without generation, and linear in the tokens. Of a larger student, or with generation, the share is smaller still.
"""

import argparse
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.credit import GROUP, credit_table
from hybrid.methods import METHODS
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.local import LocalTeacher
from teachers.protocol import Row

PROMPT = 32
"""Tokens of a prompt."""

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step is made of."""

    rows: int
    tokens: int
    hidden: int
    layers: int
    vocab: int
    rounds: int
    warmup: int = 2

    @property
    def positions(self) -> int:
        """Tokens of a step, prompts included."""
        return self.rows * (PROMPT + self.tokens)


class OnTrlHead(HybridTrainer):
    """Ours with the output head that it takes on a GPU."""

    _streams = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


@dataclass
class Turns:
    """Lets several trainings run a step each, there and back, and notes what each step took."""

    num: int
    cpu_s: list[list[float]] = field(default_factory=list)
    wall_s: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nobody has run yet."""
        self.cpu_s, self.wall_s = ([[] for _ in range(self.num)] for _ in range(2))
        self._ready = threading.Condition()
        self._turn = 0
        self._failed = False

    def wait(self, who: int) -> None:
        """Returns when it is this one's turn.

        Raises:
          RuntimeError: another training has failed.
        """
        with self._ready:
            self._ready.wait_for(lambda: self._whose() == who or self._failed)
            if self._failed:
                raise RuntimeError("another training has failed")

    def done(self, *, failed: bool = False) -> None:
        """Passes the turn on."""
        with self._ready:
            self._turn += 1
            self._failed = self._failed or failed
            self._ready.notify_all()

    def _whose(self) -> int:
        place = self._turn % (2 * self.num)
        return min(place, 2 * self.num - 1 - place)


class Turn(TrainerCallback):
    """One training's part: a turn goes from the beginning of a step to that of the next, logs and all."""

    def __init__(self, turns: Turns, who: int) -> None:
        """Takes its number."""
        self.turns, self.who = turns, who
        self._began: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the last turn and waits for the next."""
        self.end()
        self.turns.wait(self.who)
        self._began = time.process_time(), time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the last turn."""
        self.end()

    def end(self) -> None:
        """Notes what the turn took."""
        if self._began is None:
            return
        self.turns.cpu_s[self.who].append(time.process_time() - self._began[0])
        self.turns.wall_s[self.who].append(time.perf_counter() - self._began[1])
        self._began = None
        self.turns.done()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    letters = {"<pad>": 0, "<eos>": 1, **{letter: place + 2 for place, letter in enumerate(string.ascii_letters)}}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(work: Work, seed: int) -> Qwen2ForCausalLM:
    """A random student or teacher."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=3 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=PROMPT + work.tokens,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).float()


def responses(work: Work, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: the same responses for every training, of half to all of the longest length."""
    chance = random.Random(trainer.state.global_step)
    ids = [
        [chance.randrange(2, work.vocab) for _ in range(chance.randint(work.tokens // 2, work.tokens))] for _ in prompts
    ]
    return {
        "prompt_ids": [[chance.randrange(2, work.vocab) for _ in range(PROMPT)] for _ in prompts],
        "completion_ids": ids,
        "logprobs": [[0.0] * len(each) for each in ids],
    }


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """1 for about half of the responses."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def trainer_of(kind: str, work: Work, folder: Path) -> Any:
    """One of the four trainings."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / kind),
        "max_steps": work.warmup + work.rounds,
        "per_device_train_batch_size": work.rows,
        "num_generations": GROUP,
        "max_completion_length": work.tokens,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "seed": 0,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    common: dict[str, Any] = {
        "reward_funcs": [reward],
        "train_dataset": Dataset.from_dict({"prompt": ["a" * PROMPT] * 64}),
        "processing_class": tokenizer(),
        "rollout_func": partial(responses, work),
    }
    student = model(work, 0)
    if kind == "stock":
        return GRPOTrainer(student, args=GRPOConfig(**settings), **common)
    args = HybridConfig(**settings)
    if kind == "opdvr":
        return HybridTrainer(student, "opdvr", LocalTeacher(model(work, 1), batch_size=work.rows), args=args, **common)
    return (OnTrlHead if kind == "trl head" else HybridTrainer)(student, "grpo", args=args, **common)


KINDS = ("stock", "trl head", "ours", "opdvr")


@dataclass(frozen=True)
class Steps:
    """What the trainings took: seconds by kind, one a round, and their logs."""

    cpu_s: dict[str, np.ndarray]
    wall_s: dict[str, np.ndarray]
    logs: dict[str, list[dict[str, float]]]
    teacher_s: float
    num_weights: int


def run_steps(work: Work) -> Steps:
    """Runs all trainings in turns."""
    turns = Turns(len(KINDS))
    with tempfile.TemporaryDirectory() as folder:
        trainers = [trainer_of(kind, work, Path(folder)) for kind in KINDS]
        errors: list[BaseException] = []

        def run(who: int) -> None:
            torch.set_num_threads(1)
            try:
                trainers[who].train()
            except BaseException as error:
                errors.append(error)
                turns.done(failed=True)
                raise

        threads = [threading.Thread(target=run, args=(who,)) for who in range(len(KINDS))]
        for who, trainer in enumerate(trainers):
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(Turn(turns, who))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        cpu_s, wall_s = (
            {kind: np.array(seconds[work.warmup :]) for kind, seconds in zip(KINDS, each, strict=True)}
            for each in (turns.cpu_s, turns.wall_s)
        )
        logs = {
            kind: [entry for entry in trainer.state.log_history if "loss" in entry]
            for kind, trainer in zip(KINDS, trainers, strict=True)
        }
    weights = sum(parameter.numel() for parameter in model(work, 0).parameters())
    return Steps(cpu_s, wall_s, logs, teacher_seconds(work), weights)


def teacher_seconds(work: Work, repeats: int = 7) -> float:
    """CPU seconds of one forward of the teacher over a step's rows, scored."""
    teacher = LocalTeacher(model(work, 1), batch_size=work.rows)
    chance = random.Random(0)
    rows = [
        Row(
            prompt_ids=tuple(chance.randrange(2, work.vocab) for _ in range(PROMPT)),
            completion_ids=tuple(
                chance.randrange(2, work.vocab) for _ in range(chance.randint(work.tokens // 2, work.tokens))
            ),
        )
        for _ in range(work.rows)
    ]
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        teacher.score(rows)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def interval(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """The ratio of medians, second over first, and its 95 % interval; the rounds are resampled as pairs."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(first), (RESAMPLES, len(first)))
    ratios = np.median(second[places], 1) / np.median(first[places], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(second) / np.median(first)), float(low), float(high)


def step_table(work: Work, steps: Steps) -> Table:
    """The four trainings beside stock TRL."""
    size = f"{work.tokens // 2} to {work.tokens} tokens, {steps.num_weights / 1e6:.1f} M weights"
    table = Table(title=f"A step of {work.rows} responses of {size}, vocabulary {work.vocab:,}; {work.rounds} rounds")
    for name in ("training", "CPU s", "over stock TRL", "95 % interval", "wall s"):
        table.add_column(name, justify="left" if name == "training" else "right")
    named = {
        "stock": "TRL GRPOTrainer",
        "trl head": "ours, GRPO, TRL's head",
        "ours": "ours, GRPO",
        "opdvr": "ours, OPDVR, local teacher",
    }
    for kind, name in named.items():
        ratio, low, high = interval(steps.cpu_s["stock"], steps.cpu_s[kind])
        medians = [float(np.median(each[kind])) for each in (steps.cpu_s, steps.wall_s)]
        told = ("1", "") if kind == "stock" else (f"{ratio:.3f}", f"{low:.3f} .. {high:.3f}")
        table.add_row(name, f"{medians[0]:.3f}", *told, f"{medians[1]:.3f}")
    return table


def step_lines(steps: Steps) -> list[str]:
    """What the table does not say."""
    stock, ours = (
        [(entry["loss"], entry["grad_norm"]) for entry in steps.logs[kind]] for kind in ("stock", "trl head")
    )
    worst = max(
        abs(a - b) / max(1.0, abs(a)) for x, y in zip(stock, ours, strict=True) for a, b in zip(x, y, strict=True)
    )
    more = float(np.median(steps.cpu_s["opdvr"]) - np.median(steps.cpu_s["ours"]))
    parts = {
        name: statistics.median(e[f"time/{name}_s"] for e in steps.logs["opdvr"]) for name in ("teacher", "student")
    }
    return [
        f"equal work: losses and gradient norms of stock TRL and ours differ by at most {worst:.1e} in all steps",
        f"OPDVR takes {more:.3f} CPU s more than GRPO; scoring with the teacher alone takes {steps.teacher_s:.3f}: "
        f"{more / steps.teacher_s:.2f} teacher forwards (wall: teacher {parts['teacher']:.3f} s, "
        f"the student's forward, which is the loss's own, {parts['student']:.3f} s)",
    ]


def main() -> None:
    """Parses the sizes, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("step", "credit"), help="one of the two tables")
    for name, value in (("rows", 16), ("tokens", 256), ("hidden", 256), ("layers", 4), ("vocab", 8192), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="of the second table")
    parser.add_argument("--us-per-token", type=float, help="of a step, where the first table is left out")
    arguments = parser.parse_args()
    names = ("rows", "tokens", "hidden", "layers", "vocab", "rounds")
    work = Work(**{name: getattr(arguments, name) for name in names})
    torch.set_num_threads(1)
    console = Console(width=130)
    s_per_token = (arguments.us_per_token or 0) / 1e6
    if arguments.only != "credit" or not s_per_token:
        steps = run_steps(work)
        s_per_token = float(np.median(steps.cpu_s["ours"])) / work.positions
        console.print(step_table(work, steps))
        for line in step_lines(steps):
            console.print(line, highlight=False)
    if arguments.only != "step":
        console.print(credit_table(arguments.methods, s_per_token, console))


if __name__ == "__main__":
    main()
