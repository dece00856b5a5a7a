"""`hybrid compare`: the statistics of runs in MLflow as sentences, tables, a report and a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from hybrid.compare.load import RunData, latest_of_each_cell, load_runs
from hybrid.compare.plots import learning_curves_png
from hybrid.compare.report import write_report
from hybrid.compare.statistics import Estimate
from hybrid.compare.summary import Summary, evaluation_metrics, summarise
from hybrid.errors import HybridError

MOST_KEYS = 4
"""Settings that a message lists."""


def compare_runs(
    *,
    uri: str,
    experiment: str,
    baseline: str | None,
    folder: Path,
    title: str,
    console: Console,
    parent_run_id: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    wanted: float = 0.03,
) -> list[Path]:
    """Compares the runs of an MLflow experiment and writes what came out.

    Args:
      uri: of the tracking store.
      experiment: its name there.
      baseline: the method that the others are compared with; None is grpo, else the first by name.
      folder: where report, picture and numbers go.
      title: of the report.
      console: for tables and sentences.
      parent_run_id: only the runs under this one.
      metric: None is avg@k.
      target: accuracy to reach; None is what the baseline ended with.
      wanted: difference that one would like to be able to see.

    Returns:
      The files written: report.html, learning_curves.png, comparison.json.

    Raises:
      DataError: no such experiment, or no training in it.
      HybridError: the baseline or the metric is in no run.
    """
    runs = load_runs(uri=uri, experiment=experiment, parent_run_id=parent_run_id)
    shown, replaced = latest_of_each_cell(runs)
    metric = metric or next(iter(evaluation_metrics(shown)), None)
    if metric is None:
        raise HybridError(f"no run of {experiment!r} has an evaluation; train with evaluate: {{}} in the experiment")
    baseline = baseline or default_baseline(shown)
    summary = summarise(shown, metric=metric, baseline=baseline, target=target, wanted=wanted)
    if replaced:
        console.print(left_out(shown, replaced), style="yellow", highlight=False, soft_wrap=True)
    print_summary(console, summary)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "comparison.json"
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    numbers.write_bytes(orjson.dumps(asdict(summary), option=options))
    report = write_report(
        runs, folder / "report.html", title=title, baseline=baseline, metric=metric, target=target, wanted=wanted
    )
    picture = learning_curves_png(runs, folder / "learning_curves.png", baseline=baseline, metric=metric)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    return [report, picture, numbers]


def left_out(shown: Sequence[RunData], replaced: Sequence[RunData]) -> str:
    """What is said of trainings that a later one of the same method, seed and task replaces, and how they differ."""
    newest = {(run.method, run.seed, run.task): run.params for run in shown}
    pairs = [(run.params, newest[run.method, run.seed, run.task]) for run in replaced]
    differ = sorted({key for old, new in pairs for key in old.keys() | new.keys() if old.get(key) != new.get(key)})
    told = f", some with another {', '.join(differ[:MOST_KEYS])}" if differ else ""
    return (
        f"left out: {len(replaced)} of {len(replaced) + len(shown)} trainings, each with a later one of the same "
        f"method, seed and task{told}; a sweep keeps such apart (vary)"
    )


def default_baseline(runs: Sequence[RunData]) -> str:
    """Grpo where it is among the methods, else the first by name."""
    methods = sorted({run.method for run in runs})
    return "grpo" if "grpo" in methods else methods[0]


def interval(estimate: Estimate) -> str:
    """A share in percent with its interval; without it where there is none, as with one seed."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return f"{100 * estimate.value:.1f}" if math.isfinite(estimate.value) else "-"
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:.1f} [dim]({low:.1f} to {high:.1f})[/dim]"


def print_summary(console: Console, summary: Summary) -> None:
    """A table per task, and a plain sentence per comparison."""
    name = summary.metric.removeprefix("eval/").replace("_at_", "@")
    for task, target in summary.target_of_task.items():
        table = Table(title=f"{task or 'all runs'}: {name} in %, 95 % intervals over seeds; target {100 * target:.1f}")
        for column in ("method", "before", "after", "area under the curve", "steps to target", "runs", "failed"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for result in (one for one in summary.results if one.task == task):
            steps = result.costs.get("steps")
            reached = "-" if steps is None or not math.isfinite(steps.median.value) else f"{steps.median.value:.0f}"
            cells = [interval(result.before), interval(result.after), interval(result.area), reached]
            table.add_row(result.method, *cells, str(result.num_runs), str(result.num_failed))
        console.print(table)
        for comparison in (one for one in summary.comparisons if one.task == task):
            console.print(f"  {comparison.sentence}", highlight=False, soft_wrap=True)
    if summary.across:
        table = Table(title="over all tasks: interquartile mean, and the chance of beating the baseline")
        for column in ("method", "interquartile mean in %", f"P(better than {summary.baseline}) in %"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for one in summary.across:
            better = "-" if one.improvement is None else interval(one.improvement)
            table.add_row(one.method, interval(one.middle), better)
        console.print(table)
