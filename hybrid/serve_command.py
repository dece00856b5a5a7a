"""`hybrid teacher serve`: the server of an experiment's teacher, started by hand."""

import shlex
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from hybrid.config import ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.sources import model_folder
from hybrid.teacher_config import LocalTeacherConfig, ServedTeacherConfig, ServerConfig, teachers_of
from hybrid.teaching import Making


def serve_experiment(config: ExperimentConfig) -> int:
    """Prints the command, runs the server until ctrl-C, and says how to reach it.

    Args:
      config: an experiment whose teacher is a model.

    Returns:
      0 after ctrl-C.

    Raises:
      ConfigError: the teacher is no model.
      TeacherError: there is no vLLM here, or the server does not start.
    """
    from teachers.serve import ServeConfig, serve, server_command, vllm_python, vllm_version

    if config.teacher is None:
        raise ConfigError("the experiment has no teacher to serve")
    block = next(iter(teachers_of(config.teacher).values()))
    if not isinstance(block, LocalTeacherConfig | ServedTeacherConfig):
        raise ConfigError("teacher: only a model can be served (teacher.model)")
    own = block.serve if isinstance(block, ServedTeacherConfig) and isinstance(block.serve, ServerConfig) else None
    settings = own.model_dump(exclude_none=True) if own else {}
    with ExitStack() as stack:
        making = Making.of(config, stack, folder=Path(), student=config.student.model)
    wanted = {
        "log_file": Path("teacher.log"),
        "max_logprobs": max(128, making.top_k),
        "max_model_len": making.max_length,
    }
    served = ServeConfig(model=model_folder(block.model, "teacher"), served_name=block.model, **(wanted | settings))
    console = Console(soft_wrap=True)
    python = vllm_python(served)
    command = server_command(served, port=served.port, python=python, version=vllm_version(python))
    console.print(shlex.join(command), highlight=False)
    with serve(served) as running:
        console.print(f"serving {running.model} at {running.url}; log: {running.log_file}", highlight=False)
        console.print(f"export HYBRID_TEACHER_API_KEY=$(cat {shlex.quote(str(running.key_file))})", highlight=False)
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            console.print("stopped")
    return 0
