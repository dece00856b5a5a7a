"""A run over two nodes, which are two launches on one machine here: what two processes of one node do."""

import os
import subprocess
import sys

import pytest

from hybrid.mlflow_store import default_uri
from tests.experiments import QUICKSTART, ROOT, as_options, losses_of, recorded_steps, small


def start(folder, processes, *more):
    changes = small(folder, "compare=[]", "engine.kind=ddp", f"engine.processes={processes}")
    command = [sys.executable, "-m", "hybrid.cli", "train", str(QUICKSTART), *as_options(changes), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process):
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said[-3000:]
    return said


def losses(folder):
    (run,) = (folder / "quickstart").glob("*/opdvr/mlflow_run")
    return losses_of(default_uri(folder), run.read_text())


@pytest.mark.processes
def test_two_nodes_train_as_one_node_with_two_processes(tmp_path, tiny_cache, port):
    ended(start(tmp_path / "one", 2))
    meeting = ("--nnodes", "2", "--rendezvous", f"localhost:{port}")
    nodes = [start(tmp_path / "two", 1, *meeting, "--node-rank", str(rank)) for rank in (0, 1)]
    first, second = [ended(node) for node in nodes]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert recorded_steps(tmp_path / "two") == [0, 1]
    assert "held-out accuracy" in first
    assert "held-out accuracy" not in second
