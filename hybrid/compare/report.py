"""One HTML file that shows how runs compare; it holds everything that it needs and opens without a network."""

import html
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy import ndarray
from scipy import stats

from hybrid.compare.load import Curve, RunData, cost_curve, latest_of_each_cell
from hybrid.compare.samples import answers_side_by_side
from hybrid.compare.statistics import LEVEL
from hybrid.compare.summary import COSTS, evaluation_metrics, method_names, summarise
from hybrid.mlflow_store import readable

# Okabe and Ito's palette, which people with any colour vision can tell apart; its yellow is too pale for lines
COLORS = ("#4d5866", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
ANATOMY = re.compile(r"(kept|gap|credit|weight)/.*|entropy.*|response_length/.*|loss/.*|.*truncated.*|kl(/.*)?")
UNITS = (
    (r"eval/avg_at_\d+", "right answers"),
    (r"eval/pass_at_\d+", "problems solved"),
    (r"kept/.*", "tokens kept"),
    (r".*truncated.*|outcome/right|group_advantage/uniform|route/.*|kl_trap/(cut|stopped)|eval/unscored", "responses"),
    (r"(gap|contrast)/at_clip|known/share", "tokens"),
    (r"(gap|contrast|kl)/.*|kl|entropy.*|kl_trap/threshold", "nats per token"),
    (r".*response_length.*|(teacher_)?tokens/total", "tokens"),
    (r"rollouts/total", "rollouts"),
    (r"time/.*_s", "seconds"),
    (r"memory/.*_gb", "GB"),
    (r"credit/kl_.*", "weight per token"),
    (r"credit/.*", "advantage per token"),
    (r"(train/)?loss(/.*)?", "loss"),
    (r"(eval/)?rewards?(/.*)?", "reward"),
)
"""What a metric counts, for the axis of its chart; the first pattern that fits."""

SHARES = frozenset({"right answers", "problems solved", "tokens kept", "responses"})
"""Those of which a metric is the share."""

_MOST_POINTS = 400


def write_report(
    runs: Sequence[RunData],
    out: Path,
    *,
    title: str,
    baseline: str,
    metric: str | None = None,
    target: float | None = None,
    wanted: float = 0.03,
) -> Path:
    """Writes the comparison as one self-contained HTML file.

    Args:
      runs: all of them; of the same method, seed and task the latest is shown and the others are counted.
      out: the file; its folder is made.
      title: shown at the top.
      baseline: the method that the others are compared with.
      metric: evaluation that stands first and that the sentences speak of; None for avg@k with the smallest k.
      target: value to be reached; None for what the baseline ended with.
      wanted: difference that one would like to be able to see.

    Returns:
      `out`.

    Raises:
      HybridError: the baseline or the metric is in no run, or a recorded rollout is malformed.
    """
    shown, superseded = latest_of_each_cell(runs)
    metrics = evaluation_metrics(shown)
    if metric is not None:
        metrics = [metric, *(name for name in metrics if name != metric)]
    summaries = [summarise(shown, metric=name, baseline=baseline, target=target, wanted=wanted) for name in metrics]
    data = {
        **_frame(shown, baseline),
        "target_given": target is not None,
        "num_superseded": len(superseded),
        "runs": _runs(shown, metrics),
        "summaries": [asdict(summary) for summary in summaries],
        "answers": [asdict(answer) for answer in answers_side_by_side(shown)],
        **_metric_lists(shown, metrics),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(title, data), encoding="utf-8")
    return out


def page(title: str, data: dict[str, Any]) -> str:
    """The HTML text: plotly.js, style, script and data in one."""
    from plotly.offline import get_plotlyjs

    folder = resources.files("hybrid.compare.page")
    # inside <script>, only "<" can end the data or open a comment
    packed = orjson.dumps(_plain(data), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    parts = {
        "title": html.escape(readable(title)),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        "data": packed.replace("<", "\\u003c"),
        "script": "".join((folder / name).read_text(encoding="utf-8") for name in ("page.js", "answers.js")),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def style_of_methods(methods: Sequence[str]) -> list[dict[str, str]]:
    """A colour, dash and symbol for each method, all different up to 21; the first, the baseline, is grey."""
    return [
        {
            "name": name,
            "color": COLORS[index % len(COLORS)],
            "dash": DASHES[index // len(COLORS) % len(DASHES)],
            "symbol": SYMBOLS[index % len(SYMBOLS)],
        }
        for index, name in enumerate(methods)
    ]


def unit_of(metric: str) -> str:
    """What a metric counts; empty where nothing is known of it."""
    return next((unit for pattern, unit in UNITS if re.fullmatch(pattern, metric)), "")


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which is shown in percent."""
    return unit_of(metric) in SHARES or metric in ("gap/at_clip", "contrast/at_clip", "known/share")


def _frame(runs: Sequence[RunData], baseline: str) -> dict[str, Any]:
    most_seeds = max(len({run.seed for run in runs}), 2)
    return {
        "baseline": baseline,
        "methods": style_of_methods(method_names(runs, baseline)),
        "seeds": sorted({run.seed for run in runs}),
        "tasks": sorted({run.task for run in runs}),
        "t_quantiles": stats.t.ppf(0.5 + LEVEL / 2, np.arange(1, most_seeds)).tolist(),
    }


def _metric_lists(runs: Sequence[RunData], evaluations: Sequence[str]) -> dict[str, Any]:
    names = sorted({name for run in runs for name in run.curves if not name.startswith("nonfinite/")})
    usual = [*evaluations[:3], *(name for name in ("reward", "loss", "train/loss") if name in names)]
    return {
        "metrics": [*evaluations, *(name for name in names if name not in evaluations)],
        "shown_metrics": usual or names[:4],
        "anatomy_metrics": [name for name in names if ANATOMY.fullmatch(name)],
        "share_metrics": [*evaluations, *(name for name in names if is_share(name) and name not in evaluations)],
        "units": {name: unit_of(name) for name in names},
        "costs": [name for name, total in COSTS.items() if total == "step" or any(total in run.curves for run in runs)],
    }


def _runs(runs: Sequence[RunData], evaluations: Sequence[str]) -> list[dict[str, Any]]:
    kept_steps = {name: _kept_steps(runs, name) for name in {name for run in runs for name in run.curves}}
    return [
        {
            "method": run.method,
            "seed": run.seed,
            "task": run.task,
            "status": run.status,
            "curves": {name: _thinned(curve, kept_steps[name]) for name, curve in run.curves.items()},
            "costs": {name: _costs(run, name, kept_steps[name]) for name in evaluations if name in run.curves},
        }
        for run in runs
    ]


def _costs(run: RunData, metric: str, kept_steps: ndarray) -> dict[str, ndarray]:
    steps_N = run.curves[metric][0]
    found = {"steps": steps_N}
    for name, total in COSTS.items():
        if total in run.curves:
            found[name] = cost_curve(run, metric, total)[0]
    keep_N = np.isin(steps_N, kept_steps)
    return {name: costs_N[keep_N] for name, costs_N in found.items()}


def _kept_steps(runs: Sequence[RunData], metric: str) -> ndarray:
    steps = np.unique(np.concatenate([run.curves[metric][0] for run in runs if metric in run.curves]))
    if len(steps) <= _MOST_POINTS:
        return steps
    return steps[np.unique(np.linspace(0, len(steps) - 1, _MOST_POINTS).astype(int))]


def _thinned(curve: Curve, kept_steps: ndarray) -> tuple[ndarray, ndarray]:
    keep_N = np.isin(curve[0], kept_steps)
    return curve[0][keep_N].astype(int), curve[1][keep_N].astype(np.float32)


def _plain(value: Any) -> Any:
    """Text without lone surrogates, all the way down; NaN and infinities are for orjson, which makes them null."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {readable(key) if isinstance(key, str) else key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
