"""`hybrid teacher serve`: the command, a server that scores, how to reach it, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from teachers.protocol import Row
from teachers.serve import PYTHON_ENV
from teachers.vllm import VllmTeacher
from tests.served import all_gone, tiny_model, vllm_python
from tests.tiny_models import tokenizer

ROOT = Path(__file__).parents[2]
YAML = """
name: x
student: {model: tiny}
teacher: {model: tiny, url: 'http://127.0.0.1:1'}
method: {name: opd}
data: {source: rows.jsonl}
train: {max_prompt_length: 40, max_completion_length: 20}
"""


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
def test_a_teacher_is_served_until_ctrl_c(tmp_path):
    tiny_model().save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "x.yaml").write_text(YAML)
    environment = {k: v for k, v in os.environ.items() if k != "HYBRID_TEACHER_API_KEY"}
    environment |= {PYTHON_ENV: vllm_python(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hybrid.cli", "teacher", "serve", "x.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            shown, serving, key = (program.stdout.readline() for _ in range(3))
            children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
            key_file = Path(key.split("cat ")[1].rstrip(")\n"))
            found = re.match(r"serving tiny at (\S+); log: teacher\.log", serving)
            assert found is not None, serving
            teacher = VllmTeacher(found[1], "tiny", api_key_file=key_file)
            scores = teacher.score([Row(prompt_ids=(3, 4), completion_ids=(5, 6))])
            teacher.close()
            assert key_file.stat().st_mode & 0o777 == 0o600
            program.send_signal(signal.SIGINT)
            assert program.wait(240) == 0
        finally:
            program.kill()  # where an assertion failed; its keeper then ends the server
    assert scores.valid_BT.all()
    for expected in ("--host 127.0.0.1", "--max-model-len 61", "--max-logprobs 128"):
        assert expected in shown
    assert not key_file.exists()
    assert all_gone([int(child) for child in children])
