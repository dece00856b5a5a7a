"""One method on several tasks: numbers over all of them, with intervals that resample runs within each task.

Values are as in `statistics.py`: one number a run, NaN for a failed one. Letters: S runs, R resamples, N all runs of
all tasks.
"""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Num
from numpy import ndarray
from scipy import stats

from hybrid.compare.statistics import LEVEL, NUM_RESAMPLES, Estimate


def interquartile_mean(
    values_of_task: Mapping[str, Num[ndarray, " _"]],
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The mean of the middle half of all runs on all tasks; an outlier moves it little.

    Args:
      values_of_task: numbers of comparable scale (accuracies), one a run; tasks may have different numbers of runs.
      level: coverage of the interval.
      num_resamples: of the stratified bootstrap.
      seed: of the resampling.

    Returns:
      With a percentile interval; NaN if some task has no finished run, for the rest would not be the same question.

    Reference:
      Agarwal et al., Deep reinforcement learning at the edge of the statistical precipice (2108.13264).
    """
    kept, num_failed = _finished(values_of_task)
    num = sum(map(len, kept))
    if not kept or any(len(values_S) == 0 for values_S in kept):
        return _none(level, num, num_failed)
    value = float(stats.trim_mean(np.concatenate(kept), 0.25))
    rng = np.random.default_rng(seed)
    resampled_RN = np.concatenate([_resampled(values_S, num_resamples, rng) for values_S in kept], axis=1)
    return _with_percentiles(value, stats.trim_mean(resampled_RN, 0.25, axis=1), kept, level, num, num_failed)


def probability_of_improvement(
    method_of_task: Mapping[str, Num[ndarray, " _"]],
    baseline_of_task: Mapping[str, Num[ndarray, " _"]],
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The chance that a run of the method is above a run of the baseline on the same task, averaged over tasks.

        P = mean over tasks of mean over both runs of [x > y] + [x = y] / 2

    Args:
      method_of_task: one number a run.
      baseline_of_task: the same tasks.
      level: coverage of the interval.
      num_resamples: of the stratified bootstrap.
      seed: of the resampling.

    Returns:
      In [0, 1] with a percentile interval; NaN if some task lacks a finished run of either.

    Raises:
      ValueError: the tasks are not the same.

    Reference:
      Agarwal et al., section 4.3 (2108.13264); Mann and Whitney (1947).
    """
    if set(method_of_task) != set(baseline_of_task):
        raise ValueError(f"the tasks differ: {sorted(method_of_task)} and {sorted(baseline_of_task)}")
    tasks = list(method_of_task)
    method, num_failed_method = _finished({task: method_of_task[task] for task in tasks})
    baseline, num_failed_baseline = _finished({task: baseline_of_task[task] for task in tasks})
    num, num_failed = sum(map(len, [*method, *baseline])), num_failed_method + num_failed_baseline
    if not tasks or any(len(values_S) == 0 for values_S in [*method, *baseline]):
        return _none(level, num, num_failed)
    rng = np.random.default_rng(seed)
    wins = [_wins(x[None], y[None])[0] for x, y in zip(method, baseline, strict=True)]
    resampled = [
        _wins(_resampled(x, num_resamples, rng), _resampled(y, num_resamples, rng))
        for x, y in zip(method, baseline, strict=True)
    ]
    groups = [*method, *baseline]
    return _with_percentiles(float(np.mean(wins)), np.mean(resampled, axis=0), groups, level, num, num_failed)


def _wins(x_RS: ndarray, y_RS: ndarray) -> ndarray:
    return (0.5 + 0.5 * np.sign(x_RS[:, :, None] - y_RS[:, None, :])).mean(axis=(1, 2))


def _finished(values_of_task: Mapping[str, ndarray]) -> tuple[list[ndarray], int]:
    values = [np.asarray(values_S, float) for values_S in values_of_task.values()]
    kept = [values_S[np.isfinite(values_S)] for values_S in values]
    return kept, sum(map(len, values)) - sum(map(len, kept))


def _resampled(values_S: ndarray, num_resamples: int, rng: np.random.Generator) -> ndarray:
    return values_S[rng.integers(len(values_S), size=(num_resamples, len(values_S)))]


def _none(level: float, num: int, num_failed: int) -> Estimate:
    return Estimate(
        value=math.nan, low=math.nan, high=math.nan, level=level, num=num, num_failed=num_failed, interval="none"
    )


def _with_percentiles(
    value: float, resampled_R: ndarray, groups: list[ndarray], level: float, num: int, num_failed: int
) -> Estimate:
    if all(len(values_S) < 2 for values_S in groups):
        low, high, interval = math.nan, math.nan, "none"
    else:
        low, high = np.quantile(resampled_R, [0.5 - level / 2, 0.5 + level / 2])
        interval = "percentile"
    return Estimate(
        value=value, low=float(low), high=float(high), level=level, num=num, num_failed=num_failed, interval=interval
    )
