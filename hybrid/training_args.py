"""An experiment's settings as TRL's training arguments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid.config import ExperimentConfig
from hybrid.engine import Work, deepspeed_settings, needs_vllm, this_rank
from hybrid.methods import MethodConfig
from hybrid.trainer import HybridConfig


def training_args(
    config: ExperimentConfig, method: MethodConfig, folder: Path, *, reward_weights: Sequence[float]
) -> HybridConfig:
    """The arguments of one training.

    A step is one generation batch: prompts_per_step * generations responses over all processes, taken in micro-batches.
    """
    train, student = config.train, config.student
    work = Work.of(config, this_rank().world)
    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu if config.engine.bf16 is None else config.engine.bf16
    every = train.save_every or train.steps
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": train.steps,
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "num_generations": train.generations,
        "num_iterations": train.iterations,
        "max_completion_length": train.max_completion_length,
        "temperature": train.temperature,
        "top_p": train.top_p,
        "learning_rate": student.lr,
        "lr_scheduler_type": student.scheduler,
        "warmup_steps": student.warmup_steps,
        "weight_decay": student.weight_decay,
        "max_grad_norm": student.max_grad_norm,
        "gradient_checkpointing": student.gradient_checkpointing,
        "chat_template_kwargs": dict(student.chat_template_kwargs),
        "save_strategy": "steps",
        "save_steps": every,
        "save_total_limit": train.save_keep,
        "logging_steps": 1,
        "logging_first_step": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": config.seed,
        "use_cpu": not on_gpu,
        "bf16": bf16,
        "reward_weights": list(reward_weights) or None,
        "bad_gradients": config.engine.bad_gradients,
        "max_tokens_per_micro_batch": config.engine.max_tokens_per_micro_batch,
    }
    settings |= rollout_settings(config)
    if config.engine.kind == "deepspeed":
        settings["deepspeed"] = deepspeed_settings(
            config, micro_batch=work.micro_batch, accumulation=work.accumulation, bf16=bf16
        )
    return HybridConfig(**(settings | dict(train.trl)))


def rollout_settings(config: ExperimentConfig) -> dict[str, Any]:
    """TRL's fields for what generates the responses; none where the training processes do it themselves.

    The correction is token by token and truncated by default: TRL's own default masks whole sequences whose engine
    drifted from the trainer, and would throw the teacher's signal on all their tokens away with them.

    Raises:
      ConfigError: vLLM is wanted and not installed here.
    """
    rollouts, train = config.engine.rollouts, config.train
    if rollouts.engine == "transformers":
        return {}
    needs_vllm(config)
    corrects = rollouts.correction != "none"
    settings: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": rollouts.engine.removeprefix("vllm_"),
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_clip_max": rollouts.correction_max,
    }
    if corrects:
        settings["vllm_importance_sampling_mode"] = rollouts.correction
    if rollouts.engine == "vllm_server":
        return settings | {"vllm_server_base_url": rollouts.url}
    if train.max_prompt_length is not None:
        settings["vllm_max_model_length"] = train.max_prompt_length + train.max_completion_length
    return settings | {
        "vllm_gpu_memory_utilization": rollouts.gpu_memory,
        "vllm_tensor_parallel_size": rollouts.tensor_parallel,
    }
