"""A run killed between two steps goes on from its checkpoint as if it had never been broken off, to the last bit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "integration" / "resume_worker.py")
CLOCKS = r"step_time|time/.*|train_.*|total_flos"
"""What a clock says, and sums of a whole call of `train`."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, WORKER, str(folder)], env=os.environ | own, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def entries(path: Path) -> list[dict[str, float]]:
    log = json.loads(path.read_text())["log"]
    return [{name: value for name, value in entry.items() if not re.fullmatch(CLOCKS, name)} for entry in log]


@pytest.mark.processes
@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize("case", ["grpo", "kat", "sipo", "ema", "snapshot reverse KL"])
def test_a_killed_run_goes_on_bit_by_bit(runs, case):
    unbroken, resumed = (runs / f"{case}.{name}.json" for name in ("unbroken", "resumed"))
    assert entries(resumed) == entries(unbroken)
    assert json.loads(resumed.read_text())["weights"] == json.loads(unbroken.read_text())["weights"]
    losses = [entry["loss"] for entry in entries(unbroken) if "loss" in entry]
    assert len(losses) == 12
    assert len(set(losses)) > 6, "a run in which nothing happens would prove nothing"
