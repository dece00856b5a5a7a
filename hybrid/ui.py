"""`hybrid ui`: MLflow's own page on the store of an experiment, for this machine alone."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hybrid.config import TrackingConfig
from hybrid.errors import DataError
from hybrid.mlflow_store import default_uri
from hybrid.read_config import read_experiment

LOOPBACK = "127.0.0.1"
STOP_S = 5.0  # that MLflow has to end by itself


def store_uri(tracking: TrackingConfig) -> str:
    """The tracking URI of an experiment."""
    return tracking.uri or default_uri(Path(tracking.folder))


def ui_command(uri: str, port: int) -> list[str]:
    """The command that opens MLflow on a store."""
    return [
        sys.executable,
        "-m",
        "mlflow",
        "ui",
        "--backend-store-uri",
        uri,
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--workers",
        "1",
    ]


def open_ui(file: Path | None, settings: Sequence[str], *, uri: str | None, folder: Path | None, port: int) -> int:
    """Runs MLflow's page until it is ended.

    Args:
      file: an experiment, for its store; None for the default store in `runs`.
      settings: overrides of the file.
      uri: a store, which goes before all others.
      folder: of runs with the default store in it, which goes before the file's.
      port: to listen on.

    Returns:
      MLflow's exit code; 0 where the store is a server that has a page of its own.

    Raises:
      DataError: there is no store yet.
    """
    tracking = TrackingConfig() if file is None else read_experiment(file, settings).tracking
    chosen = uri or (store_uri(tracking) if folder is None else default_uri(folder))
    console = Console(soft_wrap=True)
    if chosen.startswith(("http://", "https://")):
        console.print(f"The runs are on an MLflow server with a page of its own: {chosen}", markup=False)
        return 0
    database = chosen.removeprefix("sqlite:///")
    if chosen.startswith("sqlite:///") and not Path(database).is_file():
        raise DataError(f"there are no runs yet: {database} does not exist; train first, or name a store with --uri")
    command = ui_command(chosen, port)
    console.print(f"http://{LOOPBACK}:{port}\n{shlex.join(command)}", markup=False)
    return _run_until_ended(command)


def _run_until_ended(command: Sequence[str]) -> int:
    """Runs a server with its children in a group of their own, which ends with us however we end."""
    server = subprocess.Popen(command, start_new_session=True)
    try:
        return server.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
