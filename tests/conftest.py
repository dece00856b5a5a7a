"""Shapes and types of the package are checked while its tests run; hypothesis repeats itself."""

import os
import signal
import threading
from collections.abc import Iterator

# what the hub has is not asked in tests; it is read when transformers is imported, so it stands before all else
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

if threading.current_thread() is threading.main_thread():
    # A shell that starts the tests in the background has them ignore ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from teachers.ports import port_of, reserved_port
from tests import typechecks
from tests.command_line import run_hybrid  # noqa: F401 - a fixture
from tests.experiments import tiny_cache  # noqa: F401 - a fixture
from tests.float64 import numbers_of
from tests.forks import forks  # noqa: F401 - a fixture
from tests.served import vllm_server  # noqa: F401 - a fixture

install_import_hook("hybrid", f"{typechecks.__name__}.checked")

# Whatever the shell has set: servers on this machine are asked directly, and what is printed is plain and 80 wide.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "MLFLOW_TRACKING_URI", "HYBRID_TEACHER_API_KEY"):
    os.environ.pop(name, None)

settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=12,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def single_precision() -> Iterator[None]:
    """Numbers are float32, whatever a test file before this one has left; folders of mathematics have float64."""
    with numbers_of(torch.float32):
        yield


@pytest.fixture
def port():
    """A port of this machine that nobody else is given while the test runs, for a server that it starts."""
    with reserved_port() as kept:
        yield port_of(kept)
