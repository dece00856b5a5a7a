"""One process or many: what an experiment's `engine:` block asks for, and how its processes are started.

`hybrid train FILE` starts what is needed by itself: where the block asks for more than this process, `launch` becomes
PyTorch's elastic agent (what `torchrun` is) and runs the same command once per process; each of these sees `LOCAL_RANK`
and trains. The agent restarts nothing: a run that lost a process goes on from its checkpoint.
"""

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybrid.config import EngineConfig, ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.tiny import cache_root
from teachers.ports import port_of, reserved_port

GRACE_S = 3600
"""Seconds in which processes that were told to stop may finish their step and write a checkpoint."""

LATER = timedelta(minutes=10)
"""By how much PyTorch's own limit for processes that wait for each other comes after that of the watchdog, which says
more."""

RENDEZVOUS_S = 900
"""Seconds in which all nodes must have come."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which one this is.

    Attributes:
      count: how many.
      rank: of this one, from 0.
      rendezvous: host:port of node 0, where several are.
    """

    count: int = 1
    rank: int = 0
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot meet.

        Raises:
          ConfigError: names the option.
        """
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ConfigError(f"--node-rank must be in 0..{self.count - 1} for --nnodes {self.count}; got {self.rank}")
        if self.count > 1 and self.rendezvous is None:
            raise ConfigError(
                "--nnodes above 1 needs --rendezvous HOST:PORT, an address of node 0 that all nodes reach"
            )
        if self.rendezvous is not None and not self.rendezvous.rpartition(":")[2].isdigit():
            raise ConfigError(f"--rendezvous must be HOST:PORT; got {self.rendezvous!r}")


ONE_NODE = Nodes()


@dataclass(frozen=True)
class Rank:
    """Which of a run's processes this is.

    Attributes:
      rank: over all nodes.
      world: number of processes.
      local_rank: on this node.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.rank == 0


def this_rank() -> Rank:
    """The place that the agent gave this process; the only one where there is no agent."""
    if "LOCAL_RANK" not in os.environ:
        return Rank()
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


@dataclass(frozen=True)
class Work:
    """The batch arithmetic of a step.

    Attributes:
      responses: of a step, over all processes.
      per_process: responses of one process.
      micro_batch: responses of one forward and backward.
      accumulation: micro-batches of an update.
    """

    responses: int
    per_process: int
    micro_batch: int
    accumulation: int

    @staticmethod
    def of(config: ExperimentConfig, processes: int) -> "Work":
        """The arithmetic of an experiment.

        Raises:
          ConfigError: the responses do not divide among processes or micro-batches; the message names what fits.
        """
        train = config.train
        responses = train.prompts_per_step * train.generations
        told = f"train.prompts_per_step {train.prompts_per_step} * train.generations {train.generations}"
        if responses % processes:
            raise ConfigError(
                f"{told} = {responses} responses do not divide among {processes} processes; "
                f"choose a multiple of {processes}"
            )
        per_process = responses // processes
        micro_batch = train.micro_batch or per_process
        if per_process % micro_batch:
            fits = max(size for size in range(1, min(micro_batch, per_process) + 1) if per_process % size == 0)
            raise ConfigError(
                f"{told} over {processes} processes are {per_process} responses each, which do not divide into "
                f"micro-batches of train.micro_batch {micro_batch}; {fits} would fit"
            )
        return Work(responses, per_process, micro_batch, per_process // micro_batch)


def processes_per_node(engine: EngineConfig) -> int:
    """How many processes this node runs: as configured, else one per GPU.

    Raises:
      ConfigError: neither is there anything configured, nor a GPU.
    """
    if engine.kind == "single":
        return 1
    if engine.processes is not None:
        return engine.processes
    if num_gpus := gpus():
        return num_gpus
    raise ConfigError(f"engine.processes is missing: kind: {engine.kind} runs one process per GPU, and none was found")


def gpus() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs_launch(engine: EngineConfig) -> bool:
    """Whether this process must start others; also one process alone, where several GPUs would confuse a trainer."""
    if "LOCAL_RANK" in os.environ:
        return False
    return engine.kind != "single" or gpus() > 1


def launch(engine: EngineConfig, arguments: Sequence[str], nodes: Nodes = ONE_NODE) -> int:
    """Runs `python ARGUMENTS...` once per process, and waits.

    A signal is passed on; the processes then have `GRACE_S` to stop with a checkpoint.

    Args:
      engine: how many, and of which kind.
      arguments: of the interpreter, such as `-m hybrid.cli train FILE`.
      nodes: the machines.

    Returns:
      The exit code: 0, that of the process that failed first, or 128 + the signal.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # every process speaks for itself
    number = processes_per_node(engine)
    os.environ.update(environment(engine, number))
    here = str(Path(__file__).parents[1])  # the package may run from a checkout that is not installed
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    meeting = reserved_port()
    settings = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=number,
        run_id="hybrid",
        rdzv_backend="static",
        rdzv_endpoint=nodes.rendezvous or f"localhost:{port_of(meeting)}",
        rdzv_configs={"rank": nodes.rank, "timeout": RENDEZVOUS_S},
        local_addr=None if nodes.count > 1 else "localhost",
        max_restarts=0,
        shutdown_timeout=GRACE_S,
    )
    try:
        with meeting:
            elastic_launch(settings, sys.executable)(*arguments)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        return exit_code(error)
    return 0


def exit_code(error: Any) -> int:
    """The exit code of the process that failed first, told with its rank where nothing else tells it."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    if code < 0:
        sys.stderr.write(f"process {rank} was ended by signal {-code}; go on with --resume\n")
        return 128 - code
    return code


def environment(engine: EngineConfig, number: int) -> dict[str, str]:
    """What the processes of a node need in their environment, beside what the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // number)),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # DDP's advice about unused weights, in every process
    }
    if engine.kind == "deepspeed":
        # operators are compiled once for every run of this user, not into the working copy
        wanted["TORCH_EXTENSIONS_DIR"] = str(cache_root() / "torch_extensions")
        if not gpus():
            wanted["DS_ACCELERATOR"] = "cpu"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def join(engine: EngineConfig) -> None:
    """Joins the process group before any model is loaded; each process takes its own GPU."""
    if "LOCAL_RANK" not in os.environ:
        return
    import torch

    on_gpu = gpus() > 0
    timeout = timedelta(seconds=engine.stall_after_s) + LATER
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if engine.kind == "deepspeed":
        import deepspeed

        if not on_gpu:
            # its shared-memory reduction is compiled for a minute and saves milliseconds; gloo does without
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    elif not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)


def deepspeed_settings(config: ExperimentConfig, *, micro_batch: int, accumulation: int, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's JSON: the user's own, or ZeRO at the configured stage.

    `train_batch_size` is left out: under ZeRO-3 DeepSpeed checks it before it knows how many processes there are.

    Args:
      config: the experiment.
      micro_batch: responses of one forward and backward per process.
      accumulation: micro-batches of an update.
      bf16: whether DeepSpeed computes in bfloat16.

    Raises:
      ConfigError: the own JSON cannot be read.
    """
    engine, student = config.engine, config.student
    common = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": student.max_grad_norm,
    }
    if engine.config_file is not None:
        return own_settings(Path(engine.config_file), common)
    optimizer = {
        "type": "AdamW",
        "params": {"lr": student.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": student.weight_decay},
    }
    return {
        **common,
        "zero_optimization": zero_settings(engine),
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": sys.maxsize,
        **({"optimizer": optimizer} if engine.offload else {}),
    }


def zero_settings(engine: EngineConfig) -> dict[str, Any]:
    """The block `zero_optimization`: stage, buckets and what is kept in CPU memory."""
    stage, on_gpu = engine.stage or 2, gpus() > 0
    if engine.offload == "all" and stage != 3:
        raise ConfigError(
            f"engine.offload: all keeps the weights in CPU memory, which is stage 3; the stage is {stage}"
        )
    settings: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": on_gpu,
        "contiguous_gradients": True,
        "reduce_bucket_size": 200_000_000 if on_gpu else 1_000_000,
    }
    if stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": 50_000_000 if on_gpu else 100_000,
            "stage3_param_persistence_threshold": 100_000 if on_gpu else 1_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if engine.offload:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if engine.offload == "all":
        settings["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    return settings


def own_settings(path: Path, common: dict[str, Any]) -> dict[str, Any]:
    """A user's DeepSpeed JSON, with "auto" and missing batch sizes filled in."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"engine.config_file: {path} is no readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"engine.config_file: {path} must hold one JSON object")
    filled = {name: value for name, value in common.items() if found.get(name, "auto") == "auto"}
    return {name: value for name, value in found.items() if name != "train_batch_size" or value != "auto"} | filled


def needs_vllm(config: ExperimentConfig) -> None:
    """Refuses vLLM rollouts where vLLM is not installed, before a model is loaded.

    Raises:
      ConfigError: says what to install.
    """
    engine = config.engine.rollouts.engine
    if engine != "transformers" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"engine.rollouts.engine: {engine} needs vLLM beside the trainer, and it is not installed here: "
            "pip install 'hybrid-rl[vllm]', or generate with engine: transformers"
        )
