"""Scores the same sequences on the same vLLM server with our client and with TRL's, and prints what each costs.

    HYBRID_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.teacher

Counted per call: bytes on the wire in both directions, headers included (by a relay in a process of its own), CPU
seconds of the client's process, all its threads together, and wall time; and the largest difference between the two
clients' scores. Ours ends with tensors, TRL's with nested lists, whose way into tensors is not counted.

TRL's client wants an importable vLLM and sends no API key. So that it runs at all here, its check for vLLM is answered
with yes, and the server's key is added to its session; nothing else of it is touched.

The server is real: a small random Qwen2 with a vocabulary of 32,000 made-up words, so that ids, ranks and token texts
are as long on the wire as those of a large model. Its speed says nothing about one.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import requests
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.generation import vllm_client

from benchmarks import wire_tap
from teachers.protocol import Row, Want
from teachers.serve import ServeConfig, Served, serve
from teachers.vllm import VllmTeacher

PROMPT_SHARE = 0.25  # of each sequence
MAX_MODEL_LEN = 1024
MAX_LOGPROBS = 128


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one client needed for one batch."""

    sequences: int
    tokens: int
    k: int
    client: str
    sent: int
    received: int
    cpu_s: float
    wall_s: float


def make_model(folder: Path, vocab_size: int) -> None:
    """Writes a random model and a tokenizer of made-up words, three to eight letters long."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    while len(vocab) < vocab_size:
        word = "".join(rng.choices(letters, k=rng.randint(2, 7)))
        vocab.setdefault(rng.choice(("", "Ġ")) + word, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


class Counted:
    """The relay in a process of its own, so that its work is not counted as the client's."""

    def __init__(self, port: int):
        """Starts it in front of a server of this machine."""
        command = [sys.executable, "-m", wire_tap.__name__, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read(self) -> tuple[int, int]:
        """Bytes sent and received since the last reading."""
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        sent, received = self._line().split()
        return int(sent), int(received)

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


def trl_client(url: str, key: str) -> vllm_client.VLLMClient:
    """TRL's client, with the two things it lacks here; see the top of this file."""
    plain = requests.Session

    def with_key() -> requests.Session:
        session = plain()
        session.headers["Authorization"] = f"Bearer {key}"
        return session

    with patch.object(vllm_client, "is_vllm_available", lambda: True), patch.object(requests, "Session", with_key):
        return vllm_client.VLLMClient(base_url=url, connection_timeout=30.0)


def measured(counted: Counted, call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, Any]]:
    """Result and cost of a call: the least CPU and wall time of several, for other work only adds to them."""
    costs = []
    for _ in range(repeats):
        counted.read()
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sent, received = counted.read()
        costs.append({"sent": sent, "received": received, "cpu_s": cpu, "wall_s": wall})
    best = {"cpu_s": min(cost["cpu_s"] for cost in costs), "wall_s": min(cost["wall_s"] for cost in costs)}
    return result, costs[-1] | best


def largest_difference(scores: Any, answer: dict[str, Any], k: int) -> float:
    """Over all completion tokens, sampled and top k, in nats."""
    worst = 0.0
    for i, (actual, top) in enumerate(zip(answer["actual_logprobs"], answer["logprobs"], strict=True)):
        ours = scores.logprob_BT[i, : len(actual)].double().numpy()
        worst = max(worst, float(np.abs(ours - np.array(actual)[:, 0]).max()))
        if k:
            own_TK = scores.top_logprob_BTK[i, : len(actual)].double().numpy()
            worst = max(worst, float(np.abs(own_TK - np.array(top)).max()))
    assert bool(scores.valid_BT.sum() == sum(map(len, answer["actual_logprobs"])))
    return worst


def compare(served: Served, arguments: argparse.Namespace, console: Console) -> tuple[list[Cost], float]:
    """All sizes and k, one client after the other on the same sequences."""
    costs: list[Cost] = []
    worst = 0.0
    with ExitStack() as stack:
        counted = Counted(int(served.url.rsplit(":", 1)[1]))
        stack.callback(counted.close)
        trl = trl_client(counted.url, served.key_file.read_text())
        teacher = stack.enter_context(
            VllmTeacher(
                counted.url, served.model, api_key_file=served.key_file, timeout_s=1200, compress=arguments.compress
            )
        )
        teacher.facts()
        for num, length in ((num, length) for num in arguments.sequences for length in arguments.tokens):
            rng = random.Random(num * length)
            sequences = [[rng.randrange(2, arguments.vocab) for _ in range(length)] for _ in range(num)]
            cut = int(length * PROMPT_SHARE)
            rows = [Row(prompt_ids=tuple(ids[:cut]), completion_ids=tuple(ids[cut:])) for ids in sequences]
            for k in arguments.k:
                console.print(f"{num} x {length} tokens, k = {k} ...", style="dim")
                answer, cost = measured(
                    counted,
                    lambda s=sequences, c=cut, k=k: trl.get_sequence_logprobs(s, [c] * len(s), top_logprobs=k),
                    arguments.repeats,
                )
                costs.append(Cost(sequences=num, tokens=length, k=k, client="TRL", **cost))
                scores, cost = measured(
                    counted, lambda rows=rows, k=k: teacher.score(rows, Want(top_k=k)), arguments.repeats
                )
                costs.append(Cost(sequences=num, tokens=length, k=k, client="ours", **cost))
                worst = max(worst, largest_difference(scores, answer, k))
    return costs, worst


def as_table(costs: Sequence[Cost]) -> Table:
    """Both clients side by side; ratios are ours over TRL's."""
    table = Table(title="Scoring by the same server: TRL's client and ours")
    for name in ("sequences", "k"):
        table.add_column(name, justify="right")
    for name in ("MB, TRL", "ours", "ratio", "CPU ms, TRL", "ours", "ratio", "wall s, TRL", "ours"):
        table.add_column(name, justify="right")
    by_case = {(cost.sequences, cost.tokens, cost.k, cost.client): cost for cost in costs}
    for trl in (cost for cost in costs if cost.client == "TRL"):
        _add(table, str(trl.k), trl, by_case[trl.sequences, trl.tokens, trl.k, "ours"])
    for trl in (cost for cost in costs if cost.client == "TRL" and cost.k == 1):
        # TRL's distillation asks for k = 1 where it wants the sampled token; we ask for k = 0
        if sampled := by_case.get((trl.sequences, trl.tokens, 0, "ours")):
            _add(table, "1 / 0", trl, sampled)
    return table


def _add(table: Table, k: str, trl: Cost, ours: Cost) -> None:
    wire = [(cost.sent + cost.received) / 1e6 for cost in (trl, ours)]
    table.add_row(
        *(f"{trl.sequences} x {trl.tokens}", k, f"{wire[0]:.2f}", f"{wire[1]:.2f}", f"{wire[1] / wire[0]:.2f}"),
        *(f"{trl.cpu_s * 1e3:.0f}", f"{ours.cpu_s * 1e3:.1f}", f"{ours.cpu_s / trl.cpu_s:.2f}"),
        *(f"{trl.wall_s:.2f}", f"{ours.wall_s:.2f}"),
    )


def main() -> None:
    """Parses the sizes, serves the model, compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 1000], help=f"at most {MAX_MODEL_LEN - 1}")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 20, 64], help=f"at most {MAX_LOGPROBS}")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compress", action="store_true", help="against a server that compresses")
    parser.add_argument("--json", type=Path, help="write the costs there too")
    arguments = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.vocab)
        config = ServeConfig(
            model=folder, served_name="teacher", max_logprobs=MAX_LOGPROBS, compress=arguments.compress
        )
        with serve(config) as served:
            costs, worst = compare(served, arguments, console)
    console.print(as_table(costs))
    console.print(f"largest difference between the two clients' scores: {worst:.2g} nats")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1))


if __name__ == "__main__":
    main()
