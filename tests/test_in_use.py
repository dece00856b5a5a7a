import subprocess
import sys

import pytest

from hybrid.errors import ConfigError
from hybrid.in_use import alone_in
from tests.experiments import ROOT

OTHER = """
import sys
from pathlib import Path
from hybrid.in_use import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_folder_belongs_to_one_training_at_a_time(tmp_path):
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with (
            pytest.raises(ConfigError, match=rf": process {other.pid} on .+ trains in this folder"),
            alone_in(tmp_path),
        ):
            pass
        other.kill()  # the lock goes with the process, however that ends
        other.wait()
    with alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        assert " on " in (tmp_path / "in_use").read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_is_not_told_here(tmp_path):
    with alone_in(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()
