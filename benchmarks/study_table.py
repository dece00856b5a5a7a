"""The tables of `experiments/LOG.md`, in Markdown, from the numbers that a comparison left.

    python -m benchmarks.study_table experiments/results/study.json grpo_slow opd
    python -m benchmarks.study_table experiments/results/study_rates.json --rates

The first prints a table per task: what every method reached, the area under its learning curve, and its paired
difference from each baseline that is named, with Holm's p (the comparison's own baseline if none is named). The second
prints the areas of a sweep over learning rates, and which rate the rule of section 1.4 of the log gives to each method.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.compare.statistics import PairedDifference, correct_for_many, paired_difference


def percent(estimate: Mapping[str, float], sign: str = "") -> str:
    """A share in percent with its interval."""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def differences(summary: Mapping[str, Any], task: str, baseline: str) -> dict[str, PairedDifference]:
    """Every method of a task against a baseline, from the pairs that the file holds against its own."""
    own = {one["method"]: one["differences"] for one in summary["comparisons"] if one["task"] == task}
    own[summary["baseline"]] = [0.0] * len(next(iter(own.values())))
    pairs_of = {method: np.array(values, float) for method, values in own.items() if method != baseline}
    theirs = np.array(own[baseline], float)
    found = correct_for_many([paired_difference(ours, theirs) for ours in pairs_of.values()])
    return dict(zip(pairs_of, found, strict=True))


def task_tables(summary: Mapping[str, Any], baselines: Sequence[str]) -> Iterator[str]:
    """A table per task, the method that ended highest first."""
    baselines = baselines or [summary["baseline"]] * bool(summary["comparisons"])
    for task in summary["target_of_task"]:
        yield f"{task or 'all runs'}, {summary['metric'].removeprefix('eval/').replace('_at_', '@')} in %:"
        yield ""
        yield f"| {' | '.join(['method', 'after', 'area', *(f'minus {name} | p' for name in baselines)])} |"
        yield "|---|---|---|" + "---|---|" * len(baselines)
        paired = [differences(summary, task, name) for name in baselines]
        here = [one for one in summary["results"] if one["task"] == task]
        for one in sorted(here, key=lambda one: -one["after"]["value"]):
            cells = [one["method"], percent(one["after"]), percent(one["area"])]
            for found in (of_baseline.get(one["method"]) for of_baseline in paired):
                cells += ["", ""] if found is None else [percent(asdict(found.mean), "+"), f"{found.p_holm:.3f}"]
            yield f"| {' | '.join(cells)} |"
        yield ""


def rate_table(summary: Mapping[str, Any]) -> Iterator[str]:
    """The mean area over the tasks by method and rate, and the rate with the largest; of equal ones the smallest."""
    areas: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    missing = {one["task"] for one in summary["results"] if one["area"]["value"] is None}  # begun and not gone on with
    for one in (one for one in summary["results"] if one["task"] not in missing):
        method, _, rate = one["method"].rpartition("_lr=")
        areas[method][float(rate)].append(one["area"]["value"])
    rates = sorted({rate for of_method in areas.values() for rate in of_method})
    yield f"| method | {' | '.join(f'{rate:g}' for rate in rates)} | chosen |"
    yield "|---" * (len(rates) + 2) + "|"
    for method, of_method in areas.items():
        means = {rate: sum(values) / len(values) for rate, values in sorted(of_method.items())}
        best = max(means, key=lambda rate: (means[rate], -rate))
        cells = [f"{100 * means[rate]:.1f}" for rate in rates]
        yield f"| {method} | {' | '.join(cells)} | {best:g} |"


def main(path: Path, *words: str) -> None:
    """Prints the tables of a comparison."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    print("\n".join(rate_table(summary) if words == ("--rates",) else task_tables(summary, words)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
