"""Numbers of a learning curve: the area under it, and what it cost to reach a target.

A curve is a cost (steps, rollouts, tokens, seconds) and a value at each evaluation, in order of cost; a NaN value is an
evaluation that failed. Letter: N evaluations.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Num
from numpy import ndarray
from scipy import stats

from hybrid.compare.statistics import LEVEL, ROUNDING, Estimate


@dataclass(frozen=True, kw_only=True)
class CurveArea:
    """Area under one run's curve over the length of it: the mean height, in the unit of the values.

    Attributes:
      value: NaN where the curve has less than two finite points, or ends before the length asked for.
      num_points: finite evaluations within the length.
      num_failed: evaluations within the length that are not finite; the line is drawn past them.
    """

    value: float
    num_points: int
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where one run reached a target.

    Attributes:
      cost: of the first evaluation at or above the target; of the last finite one if there is none; NaN without one.
      reached: whether it did. If not, all that is known is that it would have cost more than `cost`.
    """

    cost: float
    reached: bool


@dataclass(frozen=True, kw_only=True)
class CostToTarget:
    """The median cost of reaching a target, over runs some of which never did.

    Attributes:
      median: by Kaplan and Meier; infinite where too few runs reached the target to tell; `num_failed` counts the runs
        without any finite evaluation.
      num_reached: runs that reached it.
      num_censored: runs that ended before.
    """

    median: Estimate
    num_reached: int
    num_censored: int


def area_under_curve(
    cost_N: Num[ndarray, " N"] | Sequence[float],
    value_N: Num[ndarray, " N"] | Sequence[float],
    *,
    until: float | None = None,
) -> CurveArea:
    """The trapezoid area from the first evaluation on, divided by the length.

    Args:
      cost_N: strictly increasing.
      value_N: NaN where an evaluation failed.
      until: cost at which the area ends, the same for all runs that are compared; None for the run's own end.

    Raises:
      ValueError: the costs do not increase.
    """
    cost_N, value_N = _curve(cost_N, value_N)
    if bool((np.diff(cost_N) == 0).any()):
        raise ValueError("the costs of a curve must increase strictly to have an area under it")
    finite_N = np.isfinite(value_N)
    inside_N = cost_N <= (math.inf if until is None else until)
    num_points, num_failed = int((finite_N & inside_N).sum()), int((~finite_N & inside_N).sum())
    x_N, y_N = cost_N[finite_N], value_N[finite_N]
    if len(x_N) < 2 or (until is not None and not x_N[0] < until <= x_N[-1]):
        return CurveArea(value=math.nan, num_points=num_points, num_failed=num_failed)
    if until is not None:
        before_N = x_N < until
        x_N, y_N = np.append(x_N[before_N], until), np.append(y_N[before_N], np.interp(until, x_N, y_N))
    area = np.trapezoid(y_N, x_N) / (x_N[-1] - x_N[0])
    return CurveArea(value=float(area), num_points=num_points, num_failed=num_failed)


def first_at_target(
    cost_N: Num[ndarray, " N"] | Sequence[float], value_N: Num[ndarray, " N"] | Sequence[float], target: float
) -> Crossing:
    """Finds the first evaluation at or above the target; between two evaluations nothing is guessed.

    Raises:
      ValueError: the costs decrease.
    """
    cost_N, value_N = _curve(cost_N, value_N)
    finite_N = np.isfinite(value_N)
    if not finite_N.any():
        return Crossing(cost=math.nan, reached=False)
    above = np.flatnonzero(finite_N & (np.where(finite_N, value_N, -math.inf) >= target))
    if len(above):
        return Crossing(cost=float(cost_N[above[0]]), reached=True)
    return Crossing(cost=float(cost_N[finite_N][-1]), reached=False)


def cost_to_target(crossings: Sequence[Crossing], *, level: float = LEVEL) -> CostToTarget:
    """The median over runs, where a run that never reached the target is known to cost more than it ran.

    Returns:
      With the interval of Brookmeyer and Crowley from log-log bounds, where all runs got there from the exact binomial
      one; its upper end is infinite where the runs do not say.

    Reference:
      Kaplan and Meier (1958); Brookmeyer and Crowley, A confidence interval for the median survival time (1982);
      Clopper and Pearson (1934); scipy.stats.ecdf.
    """
    known = [one for one in crossings if math.isfinite(one.cost)]
    num_reached = sum(one.reached for one in known)
    low, median, high, interval = math.nan, math.inf if known else math.nan, math.nan, "none"
    if num_reached:
        costs = stats.CensoredData.right_censored([one.cost for one in known], [not one.reached for one in known])
        survival = stats.ecdf(costs).sf
        median = _first_at_half(survival.quantiles, survival.probabilities)
        if len(known) > 1:
            with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)  # the bounds are not defined where all or none survive
                bounds = survival.confidence_interval(level, method="log-log")
            # before the first run got there the survival is 1 and its bounds are too; where all got there it is bounded
            # from above as a share of none in so many
            most = 1 - (0.5 - level / 2) ** (1 / num_reached)
            surely_N = np.where(survival.probabilities == 1, 1.0, 0.0)
            low_N, high_N = bounds.low.probabilities, bounds.high.probabilities
            low = _first_at_half(survival.quantiles, np.where(np.isnan(low_N), surely_N, low_N))
            high = _first_at_half(survival.quantiles, np.where(np.isnan(high_N), np.maximum(surely_N, most), high_N))
            interval = "log-log"
    estimate = Estimate(
        value=median,
        low=low,
        high=high,
        level=level,
        num=len(known),
        num_failed=len(crossings) - len(known),
        interval=interval,
    )
    return CostToTarget(median=estimate, num_reached=num_reached, num_censored=len(known) - num_reached)


def _first_at_half(cost_N: ndarray, survival_N: ndarray) -> float:
    below = np.flatnonzero(survival_N <= 0.5 + ROUNDING)  # a product of shares may miss the half by its rounding
    return float(cost_N[below[0]]) if len(below) else math.inf


def _curve(cost_N: object, value_N: object) -> tuple[ndarray, ndarray]:
    costs, values = np.asarray(cost_N, float), np.asarray(value_N, float)
    if costs.shape != values.shape or bool((np.diff(costs) < 0).any()):
        raise ValueError("the costs of a curve must increase, with one value each")
    return costs, values
