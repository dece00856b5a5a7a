"""What can be said about runs with few seeds: estimates with intervals, paired tests, and a plain sentence.

A value is one run's number (the final avg@k of one seed, say). NaN stands for a run that failed; it is counted in
`num_failed` of every result and is never read as a number. Letters: P prompts, S seeds or pairs, M methods.
Intervals over several tasks and the curves of single runs stand in `tasks.py` and `curves.py`.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Num
from numpy import ndarray
from scipy import special, stats

LEVEL = 0.95
POWER = 0.8
NUM_RESAMPLES = 9999
ROUNDING = 1e-10  # numbers that differ by less than this share of the largest are equal: 0.3 and 0.1 + 0.2, say
_MOST_EXACT_PAIRS = 16  # 2^16 sign patterns are enumerated; above, as many are drawn
_PATTERNS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number, an interval around it, and what it rests on.

    Attributes:
      value: NaN where nothing could be measured.
      low: lower end of the interval; NaN where there is none (one run, say).
      high: upper end.
      level: coverage that the interval aims at, such as 0.95.
      num: runs that the value rests on.
      num_failed: runs that were to give a value and gave NaN.
      interval: how the interval was made; `equal` where all values are the same, `none` where there is none.
    """

    value: float
    low: float
    high: float
    level: float
    num: int
    num_failed: int
    interval: Literal["bca", "percentile", "equal", "log-log", "none"]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much better a method is than a baseline with the same seeds.

    Attributes:
      mean: of method minus baseline over the pairs, with its bootstrap interval.
      p_value: of the exact two-sided sign-flip test; NaN below two pairs.
      p_holm: the same after Holm's correction; equal to `p_value` until `correct_for_many`.
      sd: standard deviation of the differences.
      effect_dz: mean over sd, in standard deviations of the differences.
      effect_g: `effect_dz` with Hedges' correction for few pairs.
      cliffs_delta: share of unpaired comparisons won minus share lost, in [-1, 1].
      num_pairs: pairs in which both runs finished.
      num_failed: pairs in which at least one did not.
      num_compared: comparisons that `p_holm` is corrected for.
    """

    mean: Estimate
    p_value: float
    p_holm: float
    sd: float
    effect_dz: float
    effect_g: float
    cliffs_delta: float
    num_pairs: int
    num_failed: int
    num_compared: int = 1


def pass_at_k(
    num_samples: Num[ndarray, " P"] | Sequence[float], num_correct: Num[ndarray, " P"] | Sequence[float], k: int
) -> Num[ndarray, " P"]:
    """The chance that at least one of k samples is right, without bias, from n >= k samples.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j<k} (1 - c / (n - j))

    Args:
      num_samples: n, samples drawn for each prompt.
      num_correct: c, how many of them are right; NaN where the prompt was not scored.
      k: at least 1 and at most every n.

    Returns:
      One value in [0, 1] a prompt; NaN where `num_correct` is NaN. The product is summed in logarithms.

    Raises:
      ValueError: k or a count is out of its range.

    Reference:
      Chen et al., Evaluating large language models trained on code, equation 1 (2107.03374).
    """
    n_P, c_P = _counts(num_samples, num_correct, k)
    log_miss_P = np.zeros(n_P.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        for j in range(k):
            log_miss_P += np.log1p(-np.minimum(c_P / (n_P - j), 1.0))
    return -np.expm1(log_miss_P)


def avg_at_k(
    num_samples: Num[ndarray, " P"] | Sequence[float], num_correct: Num[ndarray, " P"] | Sequence[float], k: int
) -> Num[ndarray, " P"]:
    """The expected share of right answers among k samples, from n >= k samples: c / n, whatever k is.

    Args:
      num_samples: n, samples drawn for each prompt.
      num_correct: c, how many of them are right, or the sum of their rewards in [0, 1]; NaN where not scored.
      k: at least 1 and at most every n.

    Returns:
      One value in [0, 1] a prompt; NaN where `num_correct` is NaN.

    Raises:
      ValueError: k or a count is out of its range.
    """
    n_P, c_P = _counts(num_samples, num_correct, k)
    return c_P / n_P


def _counts(num_samples: Any, num_correct: Any, k: int) -> tuple[ndarray, ndarray]:
    n_P, c_P = np.broadcast_arrays(np.asarray(num_samples, float), np.asarray(num_correct, float))
    if k < 1 or bool((n_P < k).any()):
        raise ValueError(f"k must be at least 1 and at most the samples of every prompt; got k={k}, n={n_P.min()}")
    if bool(((c_P < 0) | (c_P > n_P)).any()):
        raise ValueError(f"num_correct must lie between 0 and num_samples; got {c_P[(c_P < 0) | (c_P > n_P)][0]}")
    return n_P, c_P


def mean_with_interval(
    values: Num[ndarray, " S"] | Sequence[float], *, level: float = LEVEL, seed: int = 0
) -> Estimate:
    """The mean over runs with a bootstrap interval, bias-corrected and accelerated (BCa) where that is possible.

    Args:
      values: one number a run; NaN for a failed run.
      level: coverage aimed at. With fewer than about ten runs a bootstrap interval covers less than it says.
      seed: of the resampling.

    Returns:
      No interval below two finished runs, one of width zero where all are equal.

    Reference:
      Efron, Better bootstrap confidence intervals (1987); scipy.stats.bootstrap.
    """
    values_S = np.asarray(values, float)
    kept_S = values_S[np.isfinite(values_S)]
    num_failed = len(values_S) - len(kept_S)
    if len(kept_S) < 2:
        value = float(kept_S[0]) if len(kept_S) else math.nan
        return Estimate(
            value=value,
            low=math.nan,
            high=math.nan,
            level=level,
            num=len(kept_S),
            num_failed=num_failed,
            interval="none",
        )
    value = float(kept_S.mean())
    low, high, interval = value, value, "equal"
    if not _all_equal(kept_S):
        low, high, interval = _bootstrap_of_mean(kept_S, level, seed)
    return Estimate(
        value=value, low=low, high=high, level=level, num=len(kept_S), num_failed=num_failed, interval=interval
    )


def _bootstrap_of_mean(values_S: ndarray, level: float, seed: int) -> tuple[float, float, Any]:
    for method in ("bca", "percentile"):
        with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # then the percentiles are taken
            found = stats.bootstrap(
                (values_S,),
                np.mean,
                n_resamples=NUM_RESAMPLES,
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            break
    return float(found.low), float(found.high), method


def paired_difference(
    method: Num[ndarray, " S"] | Sequence[float],
    baseline: Num[ndarray, " S"] | Sequence[float],
    *,
    level: float = LEVEL,
    seed: int = 0,
) -> PairedDifference:
    """Compares two methods that ran with the same seeds.

    Args:
      method: one number a seed; NaN for a failed run.
      baseline: the same seeds in the same order.
      level: coverage of the interval.
      seed: of the resampling.

    Returns:
      What rests on pairs in which both runs finished. Cliff's delta too, though it looks at all combinations of them.

    Raises:
      ValueError: the two are not of one length.
    """
    method_S, baseline_S = np.asarray(method, float), np.asarray(baseline, float)
    if method_S.shape != baseline_S.shape:
        raise ValueError(f"paired runs must match seed by seed; got {method_S.size} and {baseline_S.size} values")
    both_S = np.isfinite(method_S) & np.isfinite(baseline_S)
    difference_S = _without_rounding(method_S[both_S], baseline_S[both_S])
    all_S = np.full(method_S.shape, math.nan)
    all_S[both_S] = difference_S
    p_value = sign_flip_p_value(difference_S, seed=seed)
    dz = cohens_dz(difference_S)
    return PairedDifference(
        mean=mean_with_interval(all_S, level=level, seed=seed),
        p_value=p_value,
        p_holm=p_value,
        sd=_sd(difference_S),
        effect_dz=dz,
        effect_g=hedges_g(dz, len(difference_S)),
        cliffs_delta=cliffs_delta(method_S[both_S], baseline_S[both_S]),
        num_pairs=len(difference_S),
        num_failed=int((~both_S).sum()),
    )


def sign_flip_p_value(difference_S: Num[ndarray, " S"], *, seed: int = 0) -> float:
    """Two-sided p-value of "the differences are symmetrical around zero", by flipping their signs.

    All 2^S patterns are tried up to 16 pairs, 65 535 drawn ones above. The least it can be is 2^(1-S), so that five
    pairs never reach 0.05.

    Args:
      difference_S: method minus baseline, one a pair, all finite.
      seed: of the drawn patterns.

    Returns:
      In (0, 1]; NaN below two pairs.

    Reference:
      Fisher, The design of experiments, section 21 (1935). As scipy.stats.permutation_test, but for its ties, which it
      judges relative to the observed sum: with small differences of accuracies that is too fine for their rounding.
    """
    size_S = np.abs(np.asarray(difference_S, float))
    if len(size_S) < 2:
        return math.nan
    # sums that are equal but for rounding are equal, else a tie would count or not by chance
    reached = abs(float(np.sum(difference_S))) - ROUNDING * float(size_S.sum())
    num_pairs, rng = len(size_S), np.random.default_rng(seed)
    num_extreme = 0
    is_exact = num_pairs <= _MOST_EXACT_PAIRS
    num_patterns = 2**num_pairs if is_exact else 2**_MOST_EXACT_PAIRS - 1
    for first in range(0, num_patterns, _PATTERNS_AT_ONCE):
        num = min(_PATTERNS_AT_ONCE, num_patterns - first)
        if is_exact:
            flips = np.arange(first, first + num)[:, None] >> np.arange(num_pairs) & 1
        else:
            flips = rng.integers(0, 2, size=(num, num_pairs))
        num_extreme += int((np.abs((1 - 2 * flips) @ size_S) >= reached).sum())
    # the observed pattern is one of the drawn ones too
    return num_extreme / num_patterns if is_exact else (num_extreme + 1) / (num_patterns + 1)


def holm(p_values: Num[ndarray, " M"] | Sequence[float]) -> Num[ndarray, " M"]:
    """P-values corrected so that the chance of any false claim among them stays below the level.

    Args:
      p_values: NaN for a comparison that could not be made; it does not count as one of the many.

    Returns:
      In the order of the input, at most 1, NaN where the input is.

    Reference:
      Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    p_M = np.asarray(p_values, float)
    made = np.flatnonzero(np.isfinite(p_M))
    order = made[np.argsort(p_M[made], kind="stable")]
    corrected_M = np.full(p_M.shape, math.nan)
    corrected_M[order] = np.minimum(1.0, np.maximum.accumulate(p_M[order] * np.arange(len(order), 0, -1)))
    return corrected_M


def cohens_dz(difference_S: Num[ndarray, " S"]) -> float:
    """Mean over standard deviation of paired differences; NaN below two pairs, infinite where all are equal and not 0.

    Reference:
      Cohen, Statistical power analysis for the behavioral sciences, section 2.3.5 (1988).
    """
    if len(difference_S) < 2:
        return math.nan
    mean, sd = float(np.mean(difference_S)), _sd(difference_S)
    if sd == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / sd


def _all_equal(values_S: ndarray) -> bool:
    return float(np.ptp(values_S)) <= ROUNDING * float(np.abs(values_S).max())


def _sd(values_S: ndarray) -> float:
    """NaN below two values, and 0 where they differ by rounding alone."""
    if len(values_S) < 2:
        return math.nan
    return 0.0 if _all_equal(values_S) else float(np.std(values_S, ddof=1))


def _without_rounding(method_S: ndarray, baseline_S: ndarray) -> ndarray:
    """The differences, 0 where the two are equal but for rounding."""
    difference_S = method_S - baseline_S
    size_S = np.maximum(np.abs(method_S), np.abs(baseline_S))
    return np.where(np.abs(difference_S) <= ROUNDING * size_S, 0.0, difference_S)


def hedges_g(effect: float, num_pairs: int) -> float:
    """An effect in standard deviations, corrected for few pairs; NaN below three, where the correction is none.

        g = d * Gamma(m / 2) / (sqrt(m / 2) * Gamma((m - 1) / 2)),  m = num_pairs - 1

    Reference:
      Hedges, Distribution theory for Glass's estimator of effect size (1981).
    """
    freedom = num_pairs - 1
    if freedom < 2:
        return math.nan
    return effect * math.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(freedom / 2)


def cliffs_delta(method_S: Num[ndarray, " S"], baseline_S: Num[ndarray, " S2"]) -> float:
    """Share of all combinations in which the method is above minus share in which it is below; NaN where none are.

    Reference:
      Cliff, Dominance statistics: ordinal analyses to answer ordinal questions (1993).
    """
    if not len(method_S) or not len(baseline_S):
        return math.nan
    return float(np.sign(method_S[:, None] - baseline_S[None, :]).mean())


def fewest_seeds(level: float = LEVEL, num_compared: int = 1) -> int:
    """The fewest pairs with which the exact sign-flip test can reach the level at all: 6 at 95 %.

    Of several comparisons, Holm's correction multiplies the least p-value by their number, so that 11 need 9 pairs.
    """
    return math.ceil(1 - math.log2((1 - level) / num_compared) - 1e-9)


def seeds_needed(
    sd: float, difference: float, *, power: float = POWER, level: float = LEVEL, num_compared: int = 1
) -> float:
    """How many paired seeds would show a true difference of this size.

    Args:
      sd: standard deviation of the paired differences that was observed. From few pairs it is itself a rough guess.
      difference: the true difference that one would like to see, in the same unit.
      power: chance of seeing it.
      level: 1 minus the two-sided chance of a false claim.
      num_compared: comparisons among which it stands; the chance is divided by it, as Holm does for the clearest one.

    Returns:
      The least number at which the paired t-test has the power, but not below `fewest_seeds`; NaN for an unknown sd,
      infinite above a million.

    Raises:
      ValueError: the difference is zero, or the sd negative.

    Reference:
      Cohen, Statistical power analysis for the behavioral sciences (1988), with the noncentral t distribution.
    """
    if difference == 0 or sd < 0:
        raise ValueError(
            f"a difference that is not 0 and an sd that is not negative are needed; got {difference}, {sd}"
        )
    least = fewest_seeds(level, num_compared)
    level = 1 - (1 - level) / num_compared
    if not math.isfinite(sd):
        return math.nan
    if sd == 0 or _power(least, abs(difference) / sd, level) >= power:
        return least
    low, high = least, 2 * least
    while _power(high, abs(difference) / sd, level) < power:
        low, high = high, 2 * high
        if high > 1_000_000:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(middle, abs(difference) / sd, level) >= power else (middle, high)
    return high


def _power(num_pairs: int, effect: float, level: float) -> float:
    """Power of the two-sided paired t-test; the far tail's share is below 1e-3 here and is counted too."""
    freedom, shift = num_pairs - 1, effect * math.sqrt(num_pairs)
    edge = stats.t.ppf(0.5 + level / 2, freedom)
    return float(stats.nct.sf(edge, freedom, shift) + stats.nct.cdf(-edge, freedom, shift))


def correct_for_many(differences: Sequence[PairedDifference]) -> list[PairedDifference]:
    """The same comparisons, each with Holm's correction for standing among the others."""
    corrected_M = holm([one.p_value for one in differences])
    num = max(1, sum(math.isfinite(one.p_value) for one in differences))
    return [replace(one, p_holm=float(p), num_compared=num) for one, p in zip(differences, corrected_M, strict=True)]
