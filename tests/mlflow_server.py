"""A real MLflow server on this machine, which a test can take away and bring back."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from hybrid.mlflow_store import default_uri


@contextmanager
def mlflow_server(folder, port):
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", default_uri(folder), "--artifacts-destination", (folder / "artifacts").as_uri()]
    settings = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    server = subprocess.Popen(
        [*command, *stores], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=settings
    )
    try:
        for _ in range(1500):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "mlflow server did not start"
                time.sleep(0.1)
        else:
            pytest.fail("mlflow server does not answer")
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
