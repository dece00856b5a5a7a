"""The tables of `experiments/LOG.md`, in Markdown, from the numbers that a comparison left.

    python -m benchmarks.study_table runs/study/comparison.json
    python -m benchmarks.study_table runs/study_rates/comparison.json rates

The first prints a table per task: what every method reached, the area under its learning curve and the paired
difference from the baseline. The second prints the areas of a sweep over learning rates, and which rate the rule of
section 1.4 of the log gives to each method.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def percent(estimate: Mapping[str, float], sign: str = "") -> str:
    """A share in percent with its interval."""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def task_tables(summary: Mapping[str, Any]) -> Iterator[str]:
    """A table per task, the best area first."""
    paired = {(one["task"], one["method"]): one["found"] for one in summary["comparisons"]}
    for task in summary["target_of_task"]:
        yield f"`{task}`, {summary['metric'].removeprefix('eval/').replace('_at_', '@')} in %:"
        yield ""
        yield f"| method | after | area under the curve | minus {summary['baseline']} | p (Holm) | runs, failed |"
        yield "|---|---|---|---|---|---|"
        here = [one for one in summary["results"] if one["task"] == task]
        for one in sorted(here, key=lambda one: -one["after"]["value"]):
            found = paired.get((task, one["method"]))
            difference, p = (percent(found["mean"], "+"), f"{found['p_holm']:.3f}") if found else ("", "")
            runs = f"{one['num_runs']}, {one['num_failed']}"
            cells = [one["method"], percent(one["after"]), percent(one["area"]), difference, p, runs]
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


def main(path: Path, key: str = "tasks") -> None:
    """Prints the tables of a comparison."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    print("\n".join(rate_table(summary) if key == "rates" else task_tables(summary)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
