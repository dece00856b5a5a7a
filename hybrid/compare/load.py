"""Runs read back from MLflow as plain values.

The trainer marks a run with the tags `hybrid.kind` (`parent` or `training`), `hybrid.method`, `hybrid.seed` and
`hybrid.task`. Letter: N points of a curve.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy import ndarray

from hybrid.errors import DataError
from hybrid.mlflow_store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NONFINITE = "nonfinite/"

Curve = tuple[ndarray, ndarray]
"""Steps, strictly increasing, and the value at each; NaN where the trainer measured no finite number."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One training.

    Attributes:
      method: tag `hybrid.method`.
      seed: tag `hybrid.seed`.
      task: tag `hybrid.task`; empty where the run has none.
      status: MLflow's: FINISHED, FAILED, KILLED, RUNNING or SCHEDULED.
      params: MLflow's, as text.
      curves: by metric.
      tags: all of them.
      artifacts: the folder, where it lies on this machine; None otherwise.
      run_id: MLflow's.
      start_ms: when it began, in milliseconds since 1970.
    """

    method: str
    seed: int
    task: str
    status: str
    params: Mapping[str, str]
    curves: Mapping[str, Curve]
    tags: Mapping[str, str]
    artifacts: Path | None
    run_id: str
    start_ms: int

    @property
    def finished(self) -> bool:
        """Whether it came to its end; the last value of any other run is no result."""
        return self.status == "FINISHED"


def load_runs(
    *, uri: str, experiment: str, parent_run_id: str | None = None, download_to: Path | None = None
) -> list[RunData]:
    """Reads the trainings of an experiment, or of one parent run, oldest first, whatever their status.

    Args:
      uri: of the tracking store.
      experiment: its name.
      parent_run_id: only the runs under this one.
      download_to: where recorded rollouts of a remote store are copied to; None to leave them there.

    Raises:
      DataError: there is no such experiment or no training in it, or a training lacks a tag.
      TrackingError: the store cannot be opened.
    """
    client = open_client(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = ", ".join(sorted(one.name for one in client.search_experiments()))
        raise DataError(f"the MLflow store {uri!r} has no experiment {experiment!r}; it has: {known}")
    where = "tags.`hybrid.kind` = 'training'"
    if parent_run_id is not None:
        where += f" and tags.`mlflow.parentRunId` = '{parent_run_id}'"
    runs, token = [], None
    while True:
        page = client.search_runs(
            [found.experiment_id], where, order_by=["attributes.start_time ASC"], page_token=token
        )
        runs += [_run(client, one, download_to) for one in page]
        token = page.token
        if not token:
            break
    if not runs:
        under = "" if parent_run_id is None else f" under the run {parent_run_id}"
        raise DataError(f"the experiment {experiment!r} in {uri!r} has no training{under}; run `hybrid train` first")
    return runs


def latest_of_each_cell(runs: Sequence[RunData]) -> tuple[list[RunData], list[RunData]]:
    """Keeps, of trainings with the same method, seed and task, the one that was started last.

    Returns:
      The kept ones in their order, and those that they replace. A failed repetition replaces an earlier success: which
      of them is right is for a person to say.
    """
    newest: dict[tuple[str, int, str], RunData] = {}
    for run in sorted(runs, key=lambda run: run.start_ms):
        newest[run.method, run.seed, run.task] = run
    kept = {run.run_id for run in newest.values()}
    return [run for run in runs if run.run_id in kept], [run for run in runs if run.run_id not in kept]


def last_value(run: RunData, metric: str) -> float:
    """The result of a finished run: its last value, which may be NaN; NaN for any other run or without the metric."""
    return float(run.curves[metric][1][-1]) if run.finished and metric in run.curves else math.nan


def first_value(run: RunData, metric: str) -> float:
    """The value before training, at step 0; NaN where none was measured then."""
    steps_N, values_N = run.curves.get(metric, (np.empty(0), np.empty(0)))
    return float(values_N[0]) if len(steps_N) and steps_N[0] == 0 else math.nan


def cost_curve(run: RunData, metric: str, cost: str) -> Curve:
    """The values of `metric` over a running total such as `rollouts/total`, which is 0 before its first point.

    Returns:
      Totals, not decreasing, and values; both empty where the run lacks one of the two metrics.
    """
    if metric not in run.curves or cost not in run.curves:
        return np.empty(0), np.empty(0)
    steps_N, values_N = run.curves[metric]
    cost_steps, totals = run.curves[cost]
    known = np.isfinite(totals)
    place_N = np.searchsorted(cost_steps[known], steps_N, side="right")
    return np.maximum.accumulate(np.concatenate([[0.0], totals[known]])[place_N]), values_N


def _run(client: "MlflowClient", run: Any, download_to: Path | None) -> RunData:
    tags = dict(run.data.tags)
    curves = {name: _points(client, run.info.run_id, name) for name in run.data.metrics}
    for name in [name for name in curves if name.startswith(_NONFINITE)]:
        meant = name.removeprefix(_NONFINITE)
        curves[meant] = _with_gaps(curves.get(meant, (np.empty(0), np.empty(0))), curves[name][0])
    return RunData(
        method=_tag(tags, "hybrid.method", run.info.run_name),
        seed=_seed(_tag(tags, "hybrid.seed", run.info.run_name), run.info.run_name),
        task=tags.get("hybrid.task", ""),
        status=run.info.status,
        params=dict(run.data.params),
        curves=curves,
        tags=tags,
        artifacts=_artifacts(client, run, download_to),
        run_id=run.info.run_id,
        start_ms=run.info.start_time or 0,
    )


def _points(client: "MlflowClient", run_id: str, name: str) -> Curve:
    """One value a step: the one that was written last, for a resumed run repeats the steps since its checkpoint."""
    history = sorted(client.get_metric_history(run_id, name), key=lambda point: (point.step, point.timestamp))
    last = {point.step: point.value for point in history}
    return np.array(list(last), dtype=float), np.array(list(last.values()), dtype=float)


def _with_gaps(curve: Curve, steps_of_gaps: ndarray) -> Curve:
    # a step that has a number too was repeated after a resume, and then the number is the later one or as good
    values = {float(step): math.nan for step in steps_of_gaps} | dict(
        zip(*(axis.tolist() for axis in curve), strict=True)
    )
    steps_N = np.array(sorted(values), dtype=float)
    return steps_N, np.array([values[step] for step in steps_N], dtype=float)


def _tag(tags: Mapping[str, str], name: str, run_name: str) -> str:
    if name not in tags:
        raise DataError(f"the MLflow run {run_name!r} has no tag {name!r}; set it by hand, or delete the run")
    return tags[name]


def _seed(text: str, run_name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(
            f"the MLflow run {run_name!r} has the tag hybrid.seed = {text!r}, which is no integer"
        ) from None


def _artifacts(client: "MlflowClient", run: Any, download_to: Path | None) -> Path | None:
    address = urlsplit(run.info.artifact_uri or "")
    if address.scheme in ("", "file"):
        return Path(url2pathname(address.path))
    if download_to is None:
        return None
    folder = download_to / run.info.run_id
    folder.mkdir(parents=True, exist_ok=True)
    for entry in client.list_artifacts(run.info.run_id):
        if "rollouts" in entry.path:
            client.download_artifacts(run.info.run_id, entry.path, str(folder))
    return folder
