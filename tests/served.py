"""One real vLLM for all tests of a session: a tiny model on the CPU, in a virtual environment of its own.

The server belongs to a process of its own (the owner), which can be killed as a training run can be.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from teachers.ports import port_of, reserved_port
from teachers.serve import PYTHON_ENV
from tests.tiny_models import VOCABULARY, tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME, MAX_MODEL_LEN, MAX_LOGPROBS = "tiny", 256, 40
_OWNER = """
import sys
from teachers.serve import ServeConfig, serve
config = ServeConfig(model=sys.argv[1], served_name="tiny", device="cpu", port=int(sys.argv[2]), max_logprobs=40,
                     compress=True, log_file=sys.argv[3])
with serve(config) as served:
    print(served.key_file, served.pid, flush=True)
    sys.stdin.read()
"""


def tiny_model():
    """Big enough heads for vLLM's CPU attention, and distributions that are far from flat."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).float().eval()


def vllm_python():
    named = os.environ.get(PYTHON_ENV) or ROOT / ".venv-vllm" / "bin" / "python"
    if not Path(named).is_file():
        pytest.fail(f"{named} does not exist: `make .venv-vllm/.installed` installs the vLLM that this test talks to")
    return str(named)


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False


class LiveServer:
    """A served tiny model: `url`, `key_file`, and the `folder` with the weights that it serves."""

    def __init__(self, folder):
        self.folder, self.kept = folder / "model", reserved_port()
        self.port = port_of(self.kept)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = folder / "server.log"
        tiny_model().save_pretrained(self.folder)
        tokenizer().save_pretrained(self.folder)

    def start(self):
        command = [sys.executable, "-c", _OWNER, str(self.folder), str(self.port), str(self.log_file)]
        environment = {**os.environ, PYTHON_ENV: vllm_python(), "HYBRID_TEACHER_API_KEY": "a key of the tests"}
        self.owner = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        assert self.owner.stdout is not None
        said = self.owner.stdout.readline().split()
        assert said, f"the server did not start; see {self.log_file}"
        self.key_file, self.keeper = Path(said[0]), int(said[1])

    @property
    def processes(self):
        """The keeper, the server and all that it started."""
        found = [self.keeper]
        for pid in found:
            found += _children(pid)
        return found

    def kill(self):
        """The server dies as when memory runs out: at once, engine and all."""
        os.killpg(_children(self.keeper)[0], signal.SIGKILL)

    def kill_owner(self):
        """The run that started the server dies, and nobody is left to clean up."""
        processes = self.processes
        self.owner.kill()
        self._forget()
        return processes

    def _forget(self):
        self.owner.wait()
        assert self.owner.stdin is not None
        assert self.owner.stdout is not None
        self.owner.stdin.close()
        self.owner.stdout.close()

    def restart(self):
        self.kill_owner()
        self.start()


def all_gone(pids, within_s=120.0):
    deadline = time.monotonic() + within_s
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(lives, pids))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """Mark the tests that use it with `vllm` and put them into the xdist group of that name: one server, one worker."""
    server = LiveServer(tmp_path_factory.mktemp("served"))
    server.start()
    yield server
    key_file = server.key_file
    assert all_gone(server.kill_owner()), "a served teacher outlived the run that started it"
    server.kept.close()
    assert not key_file.parent.exists()
