"""The same training under one process, DDP and DeepSpeed ZeRO 1, 2 and 3: the same numbers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "integration" / "engine_worker.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TOLERANCE = 1e-5
OWN = (r"step_time|time/.*|micro_batches/.*|.*/(batches|positions)", r"|entropy|clip_ratio/.*")
"""Metrics that tell how the work was cut: time, forwards and padding of a teacher; TRL means over micro-batches."""


def run(engine: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    command = [sys.executable] if engine.startswith("single") else LAUNCHER
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, WORKER, str(folder / f"{engine}.json"), engine],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / f"{engine}.json").read_text())


def differences(
    case: str, want: list[dict[str, float]], got: list[dict[str, float]], tolerance: float = TOLERANCE
) -> list[str]:
    assert len(want) == len(got), case
    found = []
    for step, (one, other) in enumerate(zip(want, got, strict=True)):
        names = one.keys() | other.keys()
        own = OWN[0] + (OWN[1] if "accumulated" in case else "") + ("|grad_norm" if "skipped" in case else "")
        for name in sorted(name for name in names if not re.fullmatch(own, name)):
            here, there = one.get(name), other.get(name)
            if here is None or there is None or abs(here - there) > tolerance * max(1.0, abs(here)):
                found.append(f"{case} step {step} {name}: {here} and {there}")
    return found


@pytest.mark.processes
def test_every_method_trains_alike_under_every_engine(tmp_path):
    want = run("single", tmp_path)
    assert [entry["gradient/skipped"] for entry in want["opd skipped"]] == [1, 1]
    assert want["opd stopped"] == [{"left out": 2, "stopped in step": 2}]
    trained = {case: sum(entry.get("grad_norm", 1) for entry in entries) for case, entries in want.items()}
    assert all(trained.values()), "a case without a gradient would prove nothing"
    for engine in ("ddp", "zero1", "zero2", "zero3"):
        got = run(engine, tmp_path)
        assert got.keys() == want.keys()
        assert not [line for case in want for line in differences(case, want[case], got[case])], engine
