"""Learning curves as a picture, for a README or a paper."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray
from scipy import stats

from hybrid.compare.load import RunData, latest_of_each_cell
from hybrid.compare.report import style_of_methods
from hybrid.compare.statistics import LEVEL
from hybrid.compare.summary import evaluation_metrics, method_names
from hybrid.errors import HybridError

_DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def learning_curves_png(
    runs: Sequence[RunData], out: Path, *, baseline: str | None = None, metric: str | None = None
) -> Path:
    """Draws the mean over seeds with its 95 % t interval, one panel a task, one line a method.

    Args:
      runs: those that did not finish are left out and counted in the picture.
      out: the PNG; its folder is made.
      baseline: drawn in grey; None for the first method by name.
      metric: a share; None for the first avg@k.

    Returns:
      `out`.

    Raises:
      HybridError: no run has the metric, or the baseline is none of the methods.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown, _ = latest_of_each_cell(runs)
    metric = metric or next(iter(evaluation_metrics(shown)), None)
    if metric is None or not any(metric in run.curves for run in shown):
        raise HybridError(
            f"no run has the metric {metric or 'eval/avg_at_k'}; evaluate during training, or name another one"
        )
    styles = style_of_methods(method_names(shown, baseline or min(run.method for run in shown)))
    tasks = sorted({run.task for run in shown})
    figure = Figure(figsize=(5.6 * len(tasks) + 1.2, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        here = [run for run in shown if run.task == task]
        for style in styles:
            finished = [run for run in here if run.method == style["name"] and run.finished and metric in run.curves]
            if not finished:
                continue
            steps_N, mean_N, half_N = mean_band([run.curves[metric] for run in finished])
            axes.fill_between(
                steps_N, 100 * (mean_N - half_N), 100 * (mean_N + half_N), color=style["color"], alpha=0.14, lw=0
            )
            axes.plot(steps_N, 100 * mean_N, _DASHES[style["dash"]], color=style["color"], lw=1.8, label=style["name"])
        num_failed = sum(not run.finished for run in here)
        failed = f"{num_failed} run{'s' if num_failed > 1 else ''} failed" if num_failed else ""
        axes.set_title(" · ".join(part for part in (task, failed) if part), fontsize=10)
        axes.set_xlabel("step")
        axes.grid(color="#e9edf1")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"{metric.removeprefix('eval/').replace('_at_', '@')} in %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def mean_band(curves: Sequence[tuple[ndarray, ndarray]]) -> tuple[ndarray, ndarray, ndarray]:
    """Mean over curves at every step that one of them has, and half the width of its t interval.

    Args:
      curves: steps and values; NaN values are left out of the mean of their step alone.

    Returns:
      Steps, mean, half width; the half width is 0 where a single curve has a value.
    """
    steps_N = np.unique(np.concatenate([steps for steps, _ in curves]))
    value_SN = np.full((len(curves), len(steps_N)), math.nan)
    for row, (steps, values) in zip(value_SN, curves, strict=True):
        row[np.searchsorted(steps_N, steps)] = values
    known_N = np.isfinite(value_SN).any(axis=0)
    value_SN, steps_N = value_SN[:, known_N], steps_N[known_N]
    num_N = np.isfinite(value_SN).sum(axis=0)
    mean_N = np.nansum(value_SN, axis=0) / num_N
    spread_N = np.sqrt(np.nansum((value_SN - mean_N) ** 2, axis=0) / np.maximum(num_N - 1, 1))
    quantile_N = stats.t.ppf(0.5 + LEVEL / 2, np.maximum(num_N - 1, 1))
    return steps_N, mean_N, np.where(num_N > 1, quantile_N * spread_N / np.sqrt(num_N), 0.0)
