import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_teachers_under_zero_3_score_as_whole_ones_do(tmp_path):
    # rank 0 has three rows and rank 1 one: each must take part in the other's forwards, or both wait for ever
    worker = [str(ROOT / "tests" / "teachers" / "sharded_worker.py"), str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*launcher, *worker], env=os.environ | settings, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("moved") > 1.0
        assert found.pop("shard") == [rank, 2]
        assert set(found) == {
            "live at start",
            "average",
            "snapshot at start",
            "student given back",
            "snapshot at two",
            "head kept",
            "frozen",
        }
        assert max(found.values()) < 1e-5, found
