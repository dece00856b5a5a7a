"""The table at the end of an experiment: held-out accuracy before and after, with intervals."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybrid.evaluate import Evaluation


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training: held-out metrics of its start and of its end, and what it took."""

    method: str
    steps: int
    seconds: float
    before: Mapping[str, float]
    after: Mapping[str, float]
    intervals_before: Mapping[str, Sequence[float]]
    intervals_after: Mapping[str, Sequence[float]]


def print_outcomes(console: Console, outcomes: Sequence[Outcome], report: Path | None) -> None:
    """Prints the table and where the report lies."""
    names = shown_metrics(outcomes)
    table = Table(title="held-out accuracy in %, before -> after (95 % interval over prompts)")
    table.add_column("method")
    for name in names:
        table.add_column(name.removeprefix("eval/").replace("_at_", "@"), justify="right")
    table.add_column("steps", justify="right")
    table.add_column("seconds", justify="right")
    for outcome in outcomes:
        cells = [change(outcome, name) for name in names]
        table.add_row(outcome.method, *cells, str(outcome.steps), f"{outcome.seconds:.0f}")
    console.print(table)
    if report is not None:
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


def print_evaluation(console: Console, found: Evaluation, model: str) -> None:
    """Prints what a model reaches on held-out prompts, and how its answers were drawn."""
    sampling = found.sampling
    table = Table(
        title=f"{model}: {len(found.right_PK)} prompts x {sampling.samples} answers at temperature "
        f"{sampling.temperature}, top-p {sampling.top_p}, at most {sampling.max_completion_length} tokens, "
        f"seed {sampling.seed}"
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    intervals = found.intervals()
    for name, value in found.metrics().items():
        shown = percent(value, intervals.get(name)) if name in intervals else f"{value:.4g}"
        table.add_row(name.removeprefix("eval/").replace("_at_", "@"), shown)
    console.print(table)


def shown_metrics(outcomes: Sequence[Outcome]) -> list[str]:
    """avg@k and the largest pass@k."""
    names = sorted({name for outcome in outcomes for name in outcome.before})
    average = [name for name in names if re.fullmatch(r"eval/avg_at_\d+", name)]
    passes = sorted(
        (name for name in names if re.fullmatch(r"eval/pass_at_\d+", name)), key=lambda n: int(n.rsplit("_", 1)[1])
    )
    return [*average, *passes[-1:]]


def change(outcome: Outcome, name: str) -> str:
    """One cell: before -> after, each with its interval."""
    before = percent(outcome.before.get(name), outcome.intervals_before.get(name))
    return f"{before} -> {percent(outcome.after.get(name), outcome.intervals_after.get(name))}"


def percent(value: float | None, interval: Sequence[float] | None) -> str:
    """A share in percent with its interval."""
    if value is None:
        return "-"
    around = "" if interval is None else f" [dim]({100 * interval[0]:.0f} to {100 * interval[1]:.0f})[/dim]"
    return f"{100 * value:.1f}{around}"
