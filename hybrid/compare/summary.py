"""The numbers of a comparison: what each method reached, and how it differs from the baseline, by task and over all."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from hybrid.compare.curves import CostToTarget, area_under_curve, cost_to_target, first_at_target
from hybrid.compare.load import RunData, cost_curve, first_value, last_value
from hybrid.compare.statistics import (
    Estimate,
    PairedDifference,
    correct_for_many,
    mean_with_interval,
    paired_difference,
)
from hybrid.compare.tasks import interquartile_mean, probability_of_improvement
from hybrid.compare.verdict import verdict
from hybrid.errors import HybridError

COSTS = {
    "steps": "step",
    "rollouts": "rollouts/total",
    "tokens": "tokens/total",
    "teacher tokens": "teacher_tokens/total",
    "seconds": "time/total_s",
}
"""What a run pays in, and the metric that counts it; `step` stands for the step itself."""


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method on one task.

    Attributes:
      before: of the evaluation before the training, over all runs.
      after: of the last one, over finished runs.
      area: mean height of the curve from the start to the last step that all methods reached, over finished runs.
      costs: by key of `COSTS`, what it took to reach the target; a cost that no run counts is left out.
      num_failed: runs that did not finish, or whose last value is not finite.
    """

    method: str
    task: str
    before: Estimate
    after: Estimate
    area: Estimate
    costs: Mapping[str, CostToTarget]
    num_runs: int
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against the baseline on one task; `seeds` and `differences` are its pairs, NaN where one failed."""

    method: str
    task: str
    found: PairedDifference
    sentence: str
    seeds: Sequence[int]
    differences: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class AcrossTasks:
    """One method over all tasks; `improvement` is None for the baseline."""

    method: str
    middle: Estimate
    improvement: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All of it for one metric. `across` is empty where there is a single task."""

    metric: str
    baseline: str
    target_of_task: Mapping[str, float]
    results: Sequence[MethodResult]
    comparisons: Sequence[Comparison]
    across: Sequence[AcrossTasks]


def summarise(
    runs: Sequence[RunData],
    *,
    metric: str,
    baseline: str,
    target: float | None = None,
    wanted: float = 0.03,
) -> Summary:
    """Compares every method with the baseline; Holm's correction runs over the methods of one task.

    Args:
      runs: at most one of each method, seed and task (`latest_of_each_cell`).
      metric: a share, of which more is better, such as `eval/avg_at_4`.
      baseline: a method among the runs.
      target: value to be reached; None for what the baseline ended with, on average over its seeds.
      wanted: difference that one would like to be able to see.

    Raises:
      HybridError: the baseline or the metric is in none of the runs, or a cell stands there twice.
    """
    methods, tasks = method_names(runs, baseline), sorted({run.task for run in runs})
    if metric not in (evaluations := evaluation_metrics(runs)):
        what = "is a share of right answers" if any(metric in run.curves for run in runs) else "is in any run"
        raise HybridError(
            f"no metric {metric!r} {what}, of which more is better; the evaluations are: "
            f"{', '.join(evaluations) or 'none'}"
        )
    _refuse_percent(target, wanted)
    cells = [(run.method, run.seed, run.task) for run in runs]
    if len(set(cells)) < len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise HybridError(f"method, seed and task {twice} stand there twice; keep the latest with latest_of_each_cell")
    targets, results, comparisons = {}, [], []
    for task in tasks:
        here = [run for run in runs if run.task == task]
        ended = mean_with_interval([last_value(run, metric) for run in here if run.method == baseline]).value
        targets[task] = ended if target is None else target
        results += [_result(here, name, task, metric, targets[task]) for name in methods]
        comparisons += _comparisons(here, methods, task, metric, baseline, wanted)
    across = _across(runs, methods, tasks, metric, baseline) if len(tasks) > 1 else []
    return Summary(
        metric=metric,
        baseline=baseline,
        target_of_task=targets,
        results=results,
        comparisons=comparisons,
        across=across,
    )


def _refuse_percent(target: float | None, wanted: float) -> None:
    if not 0 < wanted <= 1:
        raise HybridError(f"wanted is a share above 0 and at most 1, such as 0.03 for 3 points; got {wanted:g}")
    if target is not None and not 0 <= target <= 1:
        raise HybridError(f"target is a share between 0 and 1, such as 0.5 for 50 %; got {target:g}")


def method_names(runs: Sequence[RunData], baseline: str) -> list[str]:
    """The methods in order, the baseline first.

    Raises:
      HybridError: the baseline is none of them.
    """
    others = sorted({run.method for run in runs})
    if baseline not in others:
        raise HybridError(f"the baseline {baseline!r} is none of the methods that ran: {', '.join(others)}")
    return [baseline, *(name for name in others if name != baseline)]


def evaluation_metrics(runs: Sequence[RunData]) -> list[str]:
    """The avg@k and pass@k metrics that some run has, avg@k first, each by growing k."""
    names = {name for run in runs for name in run.curves}
    found = [(match[1], int(match[2]), name) for name in names if (match := re.fullmatch(r"eval/(.*)_at_(\d+)", name))]
    return [name for _, _, name in sorted(found)]


def _result(runs: Sequence[RunData], method: str, task: str, metric: str, target: float) -> MethodResult:
    ours = [run for run in runs if run.method == method]
    until = min(_last_steps(runs, metric).values(), default=math.nan)
    areas = [
        area_under_curve(*run.curves[metric], until=until).value if run.finished and metric in run.curves else math.nan
        for run in ours
    ]
    costs = {}
    for name, total in COSTS.items():
        curves = [run.curves.get(metric, _EMPTY) if total == "step" else cost_curve(run, metric, total) for run in ours]
        if math.isfinite(target) and any(len(curve[0]) for curve in curves):
            costs[name] = cost_to_target([first_at_target(*curve, target) for curve in curves])
    after = mean_with_interval([last_value(run, metric) for run in ours])
    return MethodResult(
        method=method,
        task=task,
        before=mean_with_interval([first_value(run, metric) for run in ours]),
        after=after,
        area=mean_with_interval(areas),
        costs=costs,
        num_runs=len(ours),
        num_failed=after.num_failed,
    )


_EMPTY: tuple[ndarray, ndarray] = (np.empty(0), np.empty(0))


def _last_steps(runs: Sequence[RunData], metric: str) -> dict[str, float]:
    """After how many steps each method was measured last, by its finished runs."""
    finished = [run for run in runs if run.finished and metric in run.curves]
    return {
        method: max(float(run.curves[metric][0][-1]) for run in finished if run.method == method)
        for method in {run.method for run in finished}
    }


def _comparisons(
    runs: Sequence[RunData], methods: Sequence[str], task: str, metric: str, baseline: str, wanted: float
) -> list[Comparison]:
    value_of = {(run.method, run.seed): last_value(run, metric) for run in runs}
    # a seed that one of the two never ran is a pair that failed: leaving it out would hide it
    seeds_of = {name: sorted({seed for other, seed in value_of if other in (name, baseline)}) for name in methods[1:]}
    values_of = {
        name: [np.array([value_of.get((one, seed), math.nan) for seed in seeds]) for one in (name, baseline)]
        for name, seeds in seeds_of.items()
    }
    last_steps = _last_steps(runs, metric)
    found = correct_for_many([paired_difference(ours, theirs) for ours, theirs in values_of.values()])
    return [
        Comparison(
            method=name,
            task=task,
            found=one,
            sentence=_sentence(one, name, baseline, wanted, {run.method for run in runs}, last_steps),
            seeds=seeds_of[name],
            differences=(values_of[name][0] - values_of[name][1]).tolist(),
        )
        for name, one in zip(values_of, found, strict=True)
    ]


def _sentence(
    found: PairedDifference, method: str, baseline: str, wanted: float, ran: set[str], last_steps: Mapping[str, float]
) -> str:
    if absent := [name for name in (method, baseline) if name not in ran]:
        return f"{method} and {baseline} cannot be compared: no run of {' or '.join(absent)} is of this task."
    ours, theirs = last_steps.get(method), last_steps.get(baseline)
    steps = (ours, theirs) if ours is not None and theirs is not None and ours != theirs else None
    return verdict(found, method=method, baseline=baseline, wanted=wanted, steps=steps)


def _across(
    runs: Sequence[RunData], methods: Sequence[str], tasks: Sequence[str], metric: str, baseline: str
) -> list[AcrossTasks]:
    def values(method: str) -> dict[str, ndarray]:
        return {
            task: np.array([last_value(run, metric) for run in runs if (run.method, run.task) == (method, task)])
            for task in tasks
        }

    return [
        AcrossTasks(
            method=method,
            middle=interquartile_mean(values(method)),
            improvement=None if method == baseline else probability_of_improvement(values(method), values(baseline)),
        )
        for method in methods
    ]
