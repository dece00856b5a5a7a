"""MLflow: one parent run per experiment file, one child run per training, and a run that no tracking trouble can stop.

Everything goes through `delivery.Delivery`: a call only queues, a background thread sends in order. mlflow is imported
when a run is opened and not before. Names that MLflow refuses are changed, and the name that was meant is kept as a tag
`original_name/<stored name>`; an `@` becomes `_at_`, so that `eval/avg@4` is stored as `eval/avg_at_4`.
"""

import hashlib
import json
import logging
import math
import posixpath
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat

from hybrid.delivery import Delivery, Operation, read_buffer
from hybrid.environment import environment
from hybrid.mlflow_store import Sender, default_uri, find_parent, new_run, open_client, readable

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["FINISHED", "FAILED", "KILLED"]

BUFFER_NAME = "mlflow_buffer.jsonl"
MAX_PARAM_CHARS = 500  # old servers refuse more; new ones cut at 6000
MAX_TAG_CHARS = 5000
MAX_NAME_CHARS = 200  # MLflow's 250, less room for our prefixes


class Tracker:
    """One MLflow run. Open it with `Tracker.open` or `Tracker.open_parent`, in the process of rank 0 only.

    As a context manager it closes the run as FINISHED, as KILLED after ctrl-C, and as FAILED after any other error.

    Attributes:
      run_id: of the MLflow run; give it to `open` to resume.
      uri: of the tracking store.
      folder: where the records wait while the store is lost.
    """

    def __init__(self, client: "MlflowClient", *, uri: str, run_id: str, folder: Path, retry_after_s: float) -> None:
        """Takes a run that exists; see `open`."""
        self.uri = uri
        self.run_id = run_id
        self.folder = folder
        self._names: dict[str, str] = {}
        self._closed = False
        self._delivery = Delivery(
            Sender(client, run_id),
            folder / BUFFER_NAME,
            {"uri": uri, "run_id": run_id},
            retry_after_s=retry_after_s,
        )

    @classmethod
    def open(
        cls,
        *,
        uri: str | None,
        experiment: str,
        run_name: str,
        folder: Path,
        tags: Mapping[str, str],
        runs_dir: Path = Path("runs"),
        parent_run_id: str | None = None,
        run_id: str | None = None,
        artifact_location: str | None = None,
        retry_after_s: float = 5.0,
    ) -> Self:
        """Starts a run, or resumes one.

        Args:
          uri: any MLflow tracking URI; None for `default_uri(runs_dir)`.
          experiment: name of the MLflow experiment; made if it is new.
          run_name: as the runs table shows it.
          folder: the run's own folder, for records that wait.
          tags: set at the start; `mlflow.note.content` is the description.
          runs_dir: holds the default store.
          parent_run_id: of the run that this one stands under.
          run_id: a run to go on with. The store need not answer then; a new run needs it.
          artifact_location: of a new experiment; None for a folder beside an SQLite store, or the server's own choice.
          retry_after_s: wait before a lost store is tried again; it doubles up to five minutes.

        Raises:
          TrackingError: a new run cannot be made because the store does not answer or refuses.
        """
        uri = default_uri(runs_dir) if uri is None else uri
        folder.mkdir(parents=True, exist_ok=True)
        client = open_client(uri)
        parent = {} if parent_run_id is None else {"mlflow.parentRunId": parent_run_id}
        if run_id is None:
            run_id = new_run(client, uri, experiment, run_name, artifact_location, parent)
            tracker = cls(client, uri=uri, run_id=run_id, folder=folder, retry_after_s=retry_after_s)
        else:
            tracker = cls(client, uri=uri, run_id=run_id, folder=folder, retry_after_s=retry_after_s)
            tracker._put("resume", parent)
        tracker.tags(tags)
        return tracker

    @classmethod
    def open_parent(
        cls,
        *,
        uri: str | None,
        experiment: str,
        run_name: str,
        folder: Path,
        tags: Mapping[str, str],
        runs_dir: Path = Path("runs"),
        artifact_location: str | None = None,
    ) -> Self:
        """Opens the run under which the trainings of one experiment file stand; the same one at every start.

        Args: as of `open`; the tag `hybrid.kind` is set to `parent`.

        Raises:
          TrackingError: the store does not answer or refuses.
        """
        uri = default_uri(runs_dir) if uri is None else uri
        return cls.open(
            uri=uri,
            experiment=experiment,
            run_name=run_name,
            folder=folder,
            tags={**tags, "hybrid.kind": "parent"},
            run_id=find_parent(open_client(uri), uri, experiment, run_name),
            artifact_location=artifact_location,
        )

    @property
    def num_refused(self) -> int:
        """Records that the store refused so far; they stand in `mlflow_buffer_refused.jsonl`."""
        return self._delivery.num_refused

    def params(self, values: Mapping[str, Any]) -> None:
        """Logs settings, nested ones under dotted names.

        Text over 500 characters goes to the artifact `params/<name>.txt` and leaves its SHA-256 as the parameter. A
        value that differs from the one the run has already becomes the tag `resume/<n>/<name>`, where n counts the
        resumes; MLflow's own stays.
        """
        stored = {}
        for name, value in flatten(values).items():
            key = self._name(name)
            stored[key] = value
            if len(value) > MAX_PARAM_CHARS:
                self.artifact_text(f"params/{_file_name(key)}.txt", value)
                stored[key] = f"sha256:{_digest(value)}"
        self._put("params", stored)

    def metrics(self, values: Mapping[str, SupportsFloat | None], step: int) -> None:
        """Logs one point per name. NaN, infinities and None are not sent; `nonfinite/<name>` is 1 instead."""
        points = {}
        for name, value in values.items():
            number = math.nan if value is None else float(value)
            points[self._name(name if math.isfinite(number) else f"nonfinite/{name}")] = (
                number if math.isfinite(number) else 1.0
            )
        if points:
            self._put("metrics", points, step=step)

    def history(self, run_id: str, last_step: int) -> None:
        """Copies all points of an earlier run up to a step into this one, which goes on from there."""
        self._put("history", {"run_id": run_id}, step=last_step)

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags; text over 5000 characters is cut, and whole in the artifact `tags/<name>.txt`."""
        stored = {}
        for name, value in values.items():
            key, text = self._name(name), readable(str(value))
            if len(text) > MAX_TAG_CHARS:
                self.artifact_text(f"tags/{_file_name(key)}.txt", text)
            stored[key] = text[:MAX_TAG_CHARS]
        if stored:
            self._put("tags", stored)

    def artifact_text(self, name: str, text: str) -> None:
        """Keeps `text` as the artifact `name`, a relative path with an ending; lone surrogates are spelt out."""
        self._keep_text(name, readable(text))

    def artifact_json(self, name: str, value: Any) -> None:
        """Keeps a JSON value as the artifact `name`; infinities and NaN become null."""
        self._keep_text(name, json.dumps(_json_value(value), indent=2))

    def artifact_file(self, path: Path, folder: str = "") -> None:
        """Keeps a file under `folder` of the artifacts. It is read later: leave it there until `flush` or `close`."""
        self._put("artifact", {"file": str(path.resolve()), "folder": folder, "spooled": False})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows to the MLflow table `name`, to which `.json` is added where it is not there.

        A table is rewritten whole whenever it grows: a long run gives every few steps a name of their own.
        """
        if not rows:
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = {readable(key): [_json_value(row.get(key)) for row in rows] for key in columns}
        plain = permitted_name(name.removesuffix(".json"))
        self._put("table", {"file": str(self._spool("table.json", json.dumps(data))), "name": f"{plain}.json"})

    def environment(self) -> None:
        """Keeps versions, machine and git state as `environment.json`, and the commit as tags."""
        found = environment()
        self.artifact_json("environment.json", found)
        if found["git"]["commit"] is not None:
            self.tags(
                {
                    "mlflow.source.git.commit": found["git"]["commit"],
                    "hybrid.git_dirty": str(found["git"]["dirty"]).lower(),
                }
            )

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until everything has arrived; False if the store is lost or too slow."""
        return self._delivery.flush(timeout_s)

    def close(self, status: Status = "FINISHED", timeout_s: float = 60.0) -> None:
        """Ends the run. What a lost store could not take stays on disk, and `replay(folder)` sends it later.

        Args:
          status: of the run in MLflow.
          timeout_s: seconds that the store gets to take what waits.
        """
        if self._closed:
            return
        self._closed = True
        self._put("status", {"status": status})
        if num_waiting := self._delivery.close(timeout_s):
            logging.getLogger(__name__).warning(
                "%d records of run %s could not be sent and wait in %s",
                num_waiting,
                self.run_id,
                self.folder / BUFFER_NAME,
            )

    def __enter__(self) -> Self:
        """Returns itself; leaving closes the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the run with the status that the error tells."""
        self.close("FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def _put(self, kind: Any, values: Mapping[str, Any], *, step: int = 0) -> None:
        self._delivery.put(Operation(kind=kind, values=values, step=step, time_ms=time.time_ns() // 1_000_000))

    def _name(self, name: str) -> str:
        """The stored name, the same for the same name and no other's; a change is kept as a tag, once."""
        if name not in self._names:
            stored = permitted_name(name)
            if stored in self._names.values():
                stored = f"{stored[: MAX_NAME_CHARS - 9]}-{_digest(name)[:8]}"
            self._names[name] = stored
            if stored != name:
                self._put("tags", {f"original_name/{stored}": readable(name)[:MAX_TAG_CHARS]})
        return self._names[name]

    def _keep_text(self, name: str, text: str) -> None:
        folder, file_name = posixpath.split(permitted_name(name))
        file = self._spool(file_name, text)
        self._put("artifact", {"file": str(file), "folder": folder, "spooled": True})

    def _spool(self, file_name: str, text: str) -> Path:
        spool = self.folder / "mlflow_spool"
        spool.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=spool))  # a later process, perhaps with this one's number, has its own
        (folder / file_name).write_text(text, encoding="utf-8")
        return folder / file_name


def replay(folder: Path) -> int:
    """Sends the records that a lost store left in a run's folder.

    Returns:
      How many still wait; 0 also where none did.
    """
    if not (folder / BUFFER_NAME).exists():
        return 0
    address, _ = read_buffer(folder / BUFFER_NAME)
    sender = Sender(open_client(address["uri"]), address["run_id"])
    return Delivery(sender, folder / BUFFER_NAME, address).close()


def permitted_name(name: str) -> str:
    """The nearest name that MLflow takes for metrics, parameters, tags and artifacts.

    `@` becomes `_at_`, any other character than letters, digits, space and `_./-:` becomes `_`, the path is made
    relative and normal, and what is over 200 characters ends in a digest.
    """
    cleaned = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    parts = [part for part in cleaned.split("/") if part not in ("", ".")]
    cleaned = "/".join("__" if part == ".." else part for part in parts) or "unnamed"
    return cleaned if len(cleaned) <= MAX_NAME_CHARS else f"{cleaned[: MAX_NAME_CHARS - 9]}-{_digest(name)[:8]}"


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Dotted names and texts of nested settings; a list that holds a mapping is numbered, any other is JSON."""
    flat: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(f"{path}.{key}" if path else str(key), inner)
        elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
            for index, inner in enumerate(value):
                add(f"{path}.{index}", inner)
        else:
            flat[path] = readable(value if isinstance(value, str) else json.dumps(value, default=str))

    add("", values)
    return flat


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _file_name(name: str) -> str:
    """A file name of at most 100 plain characters, different for different names."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    return plain if plain == name else f"{plain}-{_digest(name)[:8]}"


def _json_value(value: Any) -> Any:
    """`value` in what JSON has: text without lone surrogates, no NaN, keys as text, numpy and torch as numbers."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, Mapping):
        return {readable(str(key)): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0:
        return [_json_value(inner) for inner in value]
    if isinstance(value, SupportsFloat):
        return float(value) if math.isfinite(float(value)) else None
    return readable(str(value))
