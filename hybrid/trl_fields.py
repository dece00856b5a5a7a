"""The names that `train.trl` may hold, read from TRL's source, since importing it takes seconds.

Only names are checked here; the values are TRL's own business when the trainer is built.
"""

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid.errors import ConfigError

OWN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "engine.bf16",
        "chat_template_kwargs": "student.chat_template_kwargs",
        "data_seed": "seed",
        "deepspeed": "engine.kind",
        "do_eval": "evaluate",
        "do_train": "train.steps",
        "eval_on_start": "evaluate",
        "eval_steps": "evaluate.every",
        "eval_strategy": "evaluate.every",
        "generation_batch_size": "train.prompts_per_step",
        "gradient_accumulation_steps": "train.micro_batch",
        "gradient_checkpointing": "student.gradient_checkpointing",
        "learning_rate": "student.lr",
        "lr_scheduler_type": "student.scheduler",
        "max_completion_length": "train.max_completion_length",
        "max_grad_norm": "student.max_grad_norm",
        "max_prompt_length": "train.max_prompt_length",
        "max_steps": "train.steps",
        "num_generations": "train.generations",
        "num_generations_eval": "evaluate.samples",
        "num_iterations": "train.iterations",
        "num_train_epochs": "train.steps",
        "output_dir": "tracking.folder",
        "per_device_eval_batch_size": "evaluate.batch_size",
        "per_device_train_batch_size": "train.micro_batch",
        "report_to": "tracking.uri",
        "reward_weights": "rewards.0.weight",
        "run_name": "name",
        "save_steps": "train.save_every",
        "save_strategy": "train.save_every",
        "save_total_limit": "train.save_keep",
        "seed": "seed",
        "steps_per_generation": "train.iterations",
        "temperature": "train.temperature",
        "top_p": "train.top_p",
        "use_vllm": "engine.rollouts.engine",
        "vllm_gpu_memory_utilization": "engine.rollouts.gpu_memory",
        "vllm_importance_sampling_clip_max": "engine.rollouts.correction_max",
        "vllm_importance_sampling_correction": "engine.rollouts.correction",
        "vllm_importance_sampling_mode": "engine.rollouts.correction",
        "vllm_mode": "engine.rollouts.engine",
        "vllm_server_base_url": "engine.rollouts.url",
        "vllm_tensor_parallel_size": "engine.rollouts.tensor_parallel",
        "warmup_steps": "student.warmup_steps",
        "weight_decay": "student.weight_decay",
    }
)
"""TRL's name -> the key of this project that sets it."""

IDLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "scale_rewards": "the method says what a reward is divided by; use its `scale` where it has one (grpo, sdpo)",
        "multi_objective_aggregation": "a method sees the weighted sum of the rewards",
    }
)
"""TRL's name of a field that would change nothing -> why."""

SURROGATE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
    }
)
"""TRL's name of a field that its own surrogate alone reads -> its default."""

_SOURCES = (
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)


@cache
def trl_field_names() -> frozenset[str]:
    """Every field of the installed `GRPOConfig`, inherited ones included.

    Raises:
      ConfigError: TRL is not installed, or keeps its fields somewhere else.
    """
    return frozenset(name for source in _SOURCES for name in _fields(*source))


def _fields(package: str, file: str, name: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    path = next((Path(folder, file) for folder in folders if Path(folder, file).is_file()), None)
    tree = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and not line.target.id.startswith("_")
            ]
    raise ConfigError(f"train.trl: {package}/{file} has no class {name}; install trl>=1.15,<1.17")
