"""`hybrid compare`: the statistics of runs in MLflow as sentences, tables, a report and a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid.compare.curves import CostToTarget
from hybrid.compare.load import RunData, latest_of_each_cell, load_runs
from hybrid.compare.plots import learning_curves_png
from hybrid.compare.report import write_report
from hybrid.compare.statistics import Estimate
from hybrid.compare.summary import COSTS, MethodResult, Summary, evaluation_metrics, summarise
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
      metric: an evaluation, as `eval/avg_at_4` or as avg@4; None is avg@k.
      target: accuracy to reach; None is what the baseline ended with.
      wanted: difference that one would like to be able to see.

    Returns:
      The files written: report.html, learning_curves.png, comparison.json.

    Raises:
      DataError: no such experiment, or no training in it.
      HybridError: the baseline or the metric is in no run, or target or wanted is no share.
    """
    runs = load_runs(uri=uri, experiment=experiment, parent_run_id=parent_run_id)
    shown, replaced = latest_of_each_cell(runs)
    evaluations = evaluation_metrics(shown)
    metric = next(iter(evaluations), None) if metric is None else stored_name(metric, evaluations)
    if metric is None:
        raise HybridError(f"no run of {experiment!r} has an evaluation; train with evaluate: {{}} in the experiment")
    baseline = baseline or default_baseline(shown)
    summary = summarise(shown, metric=metric, baseline=baseline, target=target, wanted=wanted)
    if replaced:
        console.print(left_out(shown, replaced), style="yellow", highlight=False, soft_wrap=True)
    print_summary(console, summary)
    if (most := most_tries(evaluations)) is not None and most != metric:
        print_results(console, summarise(shown, metric=most, baseline=baseline, target=target, wanted=wanted))
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


def stored_name(metric: str, evaluations: Sequence[str]) -> str:
    """The metric's name in MLflow, for one that was written as people say it: `eval/avg_at_4` for avg@4."""
    full = f"eval/{metric.replace('@', '_at_')}"
    return full if full in evaluations else metric


def most_tries(evaluations: Sequence[str]) -> str | None:
    """The pass@k with the largest k; None where there is none."""
    return next((name for name in reversed(evaluations) if name.startswith("eval/pass_at_")), None)


def interval(estimate: Estimate) -> str:
    """A share in percent with its interval, where it has one."""
    if not math.isfinite(estimate.value):
        return "-"
    around = (
        "" if estimate.interval == "none" else f" [dim]({100 * estimate.low:.1f} to {100 * estimate.high:.1f})[/dim]"
    )
    return f"{100 * estimate.value:.1f}{around}"


def cost_text(cost: CostToTarget | None) -> str:
    """A median cost with its interval."""
    if cost is None or math.isnan(cost.median.value):
        return "-"
    median = cost.median
    if not math.isfinite(median.value):
        return "not by half"
    ends = [number(end) if math.isfinite(end) else "?" for end in (median.low, median.high)]
    around = "" if median.interval == "none" else f" [dim]({' to '.join(ends)})[/dim]"
    return f"{number(median.value)}{around}"


def number(value: float) -> str:
    """A number for people: three digits, or all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_summary(console: Console, summary: Summary) -> None:
    """The tables of every task, a plain sentence per comparison, and what holds over all tasks."""
    for task, target in summary.target_of_task.items():
        print_results(console, summary, task)
        rows = [one for one in summary.results if one.task == task]
        if kinds := [kind for kind in COSTS if any(kind in one.costs for one in rows)]:
            console.print(cost_table(rows, kinds, target))
        for comparison in (one for one in summary.comparisons if one.task == task):
            console.print(f"  {comparison.sentence}", highlight=False, markup=False, soft_wrap=True)
    if summary.across:
        table = Table(title="over all tasks: interquartile mean, and the chance of beating the baseline")
        for column in ("method", "interquartile mean in %", f"P(better than {escape(summary.baseline)}) in %"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for one in summary.across:
            better = "-" if one.improvement is None else interval(one.improvement)
            table.add_row(escape(one.method), interval(one.middle), better)
        console.print(table)


def print_results(console: Console, summary: Summary, only: str | None = None) -> None:
    """What every method reached: a table for each task, or for one."""
    name = summary.metric.removeprefix("eval/").replace("_at_", "@")
    for task in summary.target_of_task if only is None else (only,):
        table = Table(title=f"{escape(task) or 'all runs'}: {name} in %, 95 % intervals over seeds")
        for column in ("method", "before", "after", "area under the curve", "runs", "failed"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for result in (one for one in summary.results if one.task == task):
            cells = [interval(one) for one in (result.before, result.after, result.area)]
            table.add_row(escape(result.method), *cells, str(result.num_runs), str(result.num_failed))
        console.print(table)


def cost_table(results: Sequence[MethodResult], kinds: Sequence[str], target: float) -> Table:
    """What it cost to reach the target: medians over runs."""
    table = Table(title=f"cost of reaching {100 * target:.1f} %: median over runs (95 % interval)")
    for column in ("method", *kinds, "got there"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for one in results:
        reached = max((cost.num_reached for cost in one.costs.values()), default=0)
        costs = (cost_text(one.costs.get(kind)) for kind in kinds)
        table.add_row(escape(one.method), *costs, f"{reached} of {one.num_runs}")
    return table
