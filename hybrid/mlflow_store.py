"""The MLflow store: opening it, the runs in it, and the calls that carry one operation each.

The only file that calls mlflow to write; it imports mlflow inside its functions, for `hybrid --help` stays fast.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hybrid.delivery import LostError, Operation
from hybrid.errors import HybridError

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

_METRICS_PER_CALL = 1000  # MLflow's own limits per log_batch call
_ENTRIES_PER_CALL = 100
_LONGEST_TABLE_LIST = 4000  # MLflow lists a run's tables in one tag, and cannot read it any more once that is cut
_TABLES_TAG = "mlflow.loggedArtifacts"
_STORE_CANNOT = ("disk is full", "disk I/O error", "readonly database", "database is locked", "unable to open database")
_SETTINGS = {  # MLflow otherwise tries for minutes, and draws its bars into ours; what the user has set stays
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


class TrackingError(HybridError):
    """The tracking store cannot be opened at the start of a run."""


def default_uri(runs_dir: Path) -> str:
    """The local SQLite store `<runs_dir>/mlflow.db`."""
    return f"sqlite:///{(runs_dir.resolve() / 'mlflow.db').as_posix()}"


def readable(text: str) -> str:
    """`text` with lone surrogates, which no file and no database takes, spelt out with a backslash."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def open_client(uri: str) -> "MlflowClient":
    """An MLflow client; makes the folder and, once, the tables of an SQLite store.

    Raises:
      TrackingError: the URI is of no kind that MLflow knows, or its database cannot be opened.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # what it logs it also raises
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mlflow's and sqlalchemy's own making while they load
        from mlflow import MlflowClient

        if not uri.startswith("sqlite:///"):
            return _or_tracking_error(uri, lambda: MlflowClient(uri))
        from filelock import FileLock

        database = Path(uri.removeprefix("sqlite:///"))
        database.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(database.with_name(f"{database.name}.lock")):  # two processes must not both make the tables
            return _or_tracking_error(uri, lambda: MlflowClient(uri))


def new_run(
    client: "MlflowClient",
    uri: str,
    experiment: str,
    run_name: str,
    artifact_location: str | None,
    tags: Mapping[str, str],
) -> str:
    """Makes a run, and the experiment if it is new or was deleted.

    Returns:
      The run's id.

    Raises:
      TrackingError: the store does not answer or refuses.
    """
    if artifact_location is None and uri.startswith("sqlite:///"):
        artifact_location = (Path(uri.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri()

    def create() -> str:
        experiment_id = _experiment_id(client, readable(experiment), artifact_location)
        return client.create_run(experiment_id, tags=dict(tags), run_name=readable(run_name)).info.run_id

    return _or_tracking_error(uri, create)


def _experiment_id(client: "MlflowClient", name: str, artifact_location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=artifact_location)
        except MlflowException as error:
            found = client.get_experiment_by_name(name)  # another process may have just made it
            if found is None:
                raise error
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def find_parent(client: "MlflowClient", uri: str, experiment: str, run_name: str) -> str | None:
    """Finds the newest run of this name that has the tag `hybrid.kind` = `parent`.

    Raises:
      TrackingError: the store does not answer.
    """

    def find() -> str | None:
        found = client.get_experiment_by_name(readable(experiment))
        if found is None:
            return None
        parents = client.search_runs([found.experiment_id], "tags.`hybrid.kind` = 'parent'", max_results=1000)
        return next((run.info.run_id for run in parents if run.info.run_name == readable(run_name)), None)

    return _or_tracking_error(uri, find)


def _or_tracking_error(uri: str, ask: Callable[[], T]) -> T:
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except (MlflowException, OSError) as error:
        raise TrackingError(
            f"tracking.uri: the MLflow store {uri!r} cannot be used: {str(error)[:500]}; start the server, correct the "
            "address, or leave it out for a local SQLite store"
        ) from error


class Sender:
    """Calls MLflow for the operations at the front of the queue.

    A run that is gone on with does again the steps after its last checkpoint. The points and tables that it has already
    are not sent a second time, so that every metric has one point per step.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        """Sends to one run."""
        self._client = client
        self._run_id = run_id
        self._resumed = False
        self._last_steps: dict[str, int] = {}
        self._known_tables = ""

    def __call__(self, operations: Sequence[Operation]) -> int:
        """Delivers the first operation, and the metrics behind it that fit into the same call.

        Returns:
          How many operations it has delivered.

        Raises:
          LostError: the store does not answer.
          MlflowException, OSError: the store answers and refuses the first operation.
        """
        from mlflow.exceptions import MlflowException

        batch = _leading_metrics(operations)
        try:
            self._send(batch)
        except (MlflowException, OSError) as error:
            self._reach(error)
            if len(batch) > 1:  # one of them is refused; alone it is found and set aside
                return self([batch[0]])
            self._send(batch)
        return len(batch)

    def _reach(self, error: Exception) -> None:
        """Returns if the store answers, so that `error` was about what was sent; raises `LostError` if it does not.

        A store that reads and cannot write just now is lost too.
        """
        from mlflow.exceptions import MlflowException

        if words := next((words for words in _STORE_CANNOT if words in str(error)), None):
            raise LostError(f"the tracking store cannot write: {words}") from error
        try:
            self._client.get_run(self._run_id)
        except (MlflowException, OSError):
            raise LostError(f"the tracking store does not answer: {str(error)[:300]}") from error

    def _send(self, batch: Sequence[Operation]) -> None:
        values = batch[0].values
        match batch[0].kind:
            case "metrics":
                self._metrics(batch)
            case "params":
                self._params(values)
            case "tags":
                self._tags(values)
            case "artifact":
                self._client.log_artifact(self._run_id, values["file"], values["folder"] or None)
                if values["spooled"]:
                    shutil.rmtree(Path(values["file"]).parent)
            case "table":
                self._table(Path(values["file"]), values["name"])
            case "resume":
                tags = self._client.get_run(self._run_id).data.tags
                self._tags({**values, "hybrid.resumes": str(int(tags.get("hybrid.resumes", "0")) + 1)})
                self._resumed, self._known_tables = True, tags.get(_TABLES_TAG, "")
                self._client.update_run(self._run_id, status="RUNNING")
            case "history":
                self._history(values["run_id"], batch[0].step)
            case "status":
                self._client.set_terminated(self._run_id, values["status"], batch[0].time_ms)

    def _metrics(self, batch: Sequence[Operation]) -> None:
        from mlflow.entities import Metric

        points = [Metric(k, v, one.time_ms, one.step) for one in batch for k, v in one.values.items()]
        if self._resumed:
            points = [point for point in points if point.step > self._last_step(point.key)]
        for start in range(0, len(points), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=points[start : start + _METRICS_PER_CALL])

    def _history(self, run_id: str, last_step: int) -> None:
        """Points of another run, as they are; that run is over, even where a kill has let nobody say so."""
        run = self._client.get_run(run_id)
        if run.info.status == "RUNNING":
            self._client.set_terminated(run_id, "KILLED")
        for name in run.data.metrics:
            known = [point for point in self._client.get_metric_history(run_id, name) if point.step <= last_step]
            for start in range(0, len(known), _METRICS_PER_CALL):
                self._client.log_batch(self._run_id, metrics=known[start : start + _METRICS_PER_CALL])

    def _last_step(self, name: str) -> int:
        """Of the points that a metric had when the run was gone on with; -1 without any."""
        if name not in self._last_steps:
            known = self._client.get_metric_history(self._run_id, name)
            self._last_steps[name] = max((point.step for point in known), default=-1)
        return self._last_steps[name]

    def _params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        data = self._client.get_run(self._run_id).data
        fresh = [Param(key, value) for key, value in values.items() if key not in data.params]
        for start in range(0, len(fresh), _ENTRIES_PER_CALL):
            self._client.log_batch(self._run_id, params=fresh[start : start + _ENTRIES_PER_CALL])
        num_resumes = data.tags.get("hybrid.resumes", "0")
        changed = {key: value for key, value in values.items() if data.params.get(key, value) != value}
        self._tags({f"resume/{num_resumes}/{key}": value for key, value in changed.items()})

    def _table(self, file: Path, name: str) -> None:
        import pandas as pd

        if json.dumps(name) in self._known_tables:
            shutil.rmtree(file.parent)
            return
        # of objects, for mlflow asks pandas for object columns in a way that pandas 3 deprecates for text columns
        rows = pd.DataFrame(json.loads(file.read_text(encoding="utf-8")), dtype=object)
        known = self._client.get_run(self._run_id).data.tags.get(_TABLES_TAG, "")
        if len(known) < _LONGEST_TABLE_LIST or json.dumps(name) in known:
            self._client.log_table(self._run_id, rows, name)
        else:
            text = rows.to_json(orient="split", index=False)
            self._client.log_text(self._run_id, text or "", name)
        shutil.rmtree(file.parent)

    def _tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        entries = [RunTag(key, value) for key, value in values.items()]
        for start in range(0, len(entries), _ENTRIES_PER_CALL):
            self._client.log_batch(self._run_id, tags=entries[start : start + _ENTRIES_PER_CALL])


def _leading_metrics(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The metrics at the front that fit into one call, or the first operation alone if it is of another kind."""
    num_points = 0
    for index, operation in enumerate(operations):
        num_points += len(operation.values)
        if operation.kind != "metrics" or num_points > _METRICS_PER_CALL:
            return operations[: max(index, 1)]
    return operations
