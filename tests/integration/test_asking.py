"""Several processes and a teacher elsewhere: one that has no row for it, and one whose rows it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "integration" / "asking_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asking")
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, WORKER, str(folder)], env=os.environ | own, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.processes
@pytest.mark.xdist_group("asking")
def test_a_process_without_rows_for_the_teacher_trains_on_with_the_others(told):
    _, (first, second) = told
    assert (first["calls"], second["calls"]) == (3, 0)
    assert [entry["teacher/rows"] for entry in first["log"]] == [4, 4, 4]


@pytest.mark.processes
@pytest.mark.xdist_group("asking")
def test_a_teacher_that_fails_one_process_stops_them_all_with_a_checkpoint(told):
    folder, (first, second) = told
    assert second["error"] == "the server is gone"
    assert first["error"] == "another process could not have its rows scored: the server is gone"
    assert [path.name for path in (folder / "fails").glob("checkpoint-*")] == ["checkpoint-2"]
