"""What assigning credit costs: `Objective.assign` of every method on batches of growing size; see `benchmarks.step`."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hybrid.methods import method_of
from hybrid.types import Demonstration, RolloutBatch, View

GROUP = 8
"""Responses of a prompt."""

SETTINGS: dict[str, dict[str, Any]] = {
    "mix": {"parts": [{"method": {"name": "grpo"}}, {"weight": 0.5, "method": {"name": "opd"}}]}
}
"""Of methods that have no defaults."""

CREDIT_SIZES = ((64, 512), (128, 1024), (256, 2048), (512, 4096))
"""Responses and tokens."""


def made_batch(rows: int, tokens: int) -> RolloutBatch:
    """A generation batch with everything that a credit can read; lengths from a tenth to all of `tokens`."""
    generator = torch.Generator().manual_seed(0)
    length_B1 = torch.randint(tokens // 10, tokens + 1, (rows, 1), generator=generator)
    mask_BT = torch.arange(tokens)[None] < length_B1

    def logprobs() -> torch.Tensor:
        return -3 * torch.rand(rows, tokens, generator=generator)

    own_BU = torch.ones(rows, 64, dtype=torch.bool)
    return RolloutBatch(
        group_B=torch.arange(rows) // GROUP,
        mask_BT=mask_BT,
        reward_B=(torch.rand(rows, generator=generator) < 0.4).float(),
        truncated_B=length_B1[:, 0] == tokens,
        student_logprob_BT=logprobs(),
        entropy_BT=torch.rand(rows, tokens, generator=generator),
        reverse_kl_BT=torch.rand(rows, tokens, generator=generator),
        teacher_accuracy_B=torch.rand(rows, generator=generator),
        views={
            name: View(logprob_BT=logprobs(), valid_BT=mask_BT)
            for name in ("teacher", "right", "wrong", "degraded", "reference")
        },
        demonstration=Demonstration(ids_BU=own_BU.long(), mask_BU=own_BU),
        max_length=tokens,
    )


def credit_seconds(name: str, batch: RolloutBatch, repeats: int = 5) -> float:
    """CPU seconds of assigning a batch's credit; the least of several."""
    objective = method_of({"name": name, **SETTINGS.get(name, {})}).build()
    state, seconds = objective.init(), []
    for _ in range(repeats):
        began = time.process_time()
        _, state = objective.assign(batch, state)
        seconds.append(time.process_time() - began)
    return min(seconds)


def growth(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent with which seconds grow in the number of tokens, from the last size but one to the last.

    Below, tensors fit into a processor's cache, and a token costs less.
    """
    return math.log(seconds[-1] / seconds[-2]) / math.log(tokens[-1] / tokens[-2])


def credit_table(names: Sequence[str], s_per_token: float, console: Console) -> Table:
    """Every method at every size."""
    table = Table(title=f"Assigning credit, CPU ms; a step of our GRPO takes {s_per_token * 1e6:.0f} us per token")
    table.add_column("method")
    for rows, tokens in CREDIT_SIZES:
        table.add_column(f"{rows} x {tokens:,}", justify="right")
    for column in ("grows as tokens to the", "share of a step, %"):
        table.add_column(column, justify="right")
    found: dict[str, list[float]] = {name: [] for name in names}
    for rows, tokens in CREDIT_SIZES:
        console.print(f"credit of {rows} x {tokens} tokens ...", style="dim")
        batch = made_batch(rows, tokens)
        for name in names:
            found[name].append(credit_seconds(name, batch))
    sizes = [rows * tokens for rows, tokens in CREDIT_SIZES]
    for name, seconds in found.items():
        share = seconds[-1] / (s_per_token * sizes[-1])
        cells = [f"{value * 1e3:.1f}" for value in seconds]
        table.add_row(name, *cells, f"{growth(sizes, seconds):.2f}", f"{100 * share:.3f}")
    return table
