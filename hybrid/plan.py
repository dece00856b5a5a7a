"""What a run will do and take, told before anything is loaded: processes, batch arithmetic, memory per process.

Memory is an estimate from the models' configurations; what a library needs for itself is not in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.config import ExperimentConfig
from hybrid.engine import ONE_NODE, Nodes, Work, gpus, processes_per_node
from hybrid.heads import CHUNK_TOKENS, CHUNK_TOKENS_GPU
from hybrid.methods import MethodConfig
from hybrid.sources import model_folder
from hybrid.teacher_config import (
    LocalTeacherConfig,
    OneTeacherConfig,
    RecordedTeacherConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    teachers_of,
)

GB = 1e9
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ACTIVATION_BYTES = 34
"""Bytes that a layer keeps per token and hidden unit for the backward pass in 16 bits (arXiv 2205.05198, Eq. 2)."""

LOGIT_COPIES = 6
"""Tensors of the size of a slice of logits that a divergence holds at once: logits, log-probs and a gradient, twice."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What the memory of a model depends on.

    Attributes:
      parameters: of the whole model.
      adapter: of a LoRA adapter on all linear layers, per unit of rank.
      layers: hidden layers.
      hidden: their width.
      key_values: numbers that the cache of a layer keeps per token.
      vocabulary: rows of the output head.
      dtype: of the checkpoint.
    """

    parameters: int
    adapter: int
    layers: int
    hidden: int
    key_values: int
    vocabulary: int
    dtype: str

    @staticmethod
    def of(folder: str) -> "Size | None":
        """The size of a model, from its configuration alone; None where that cannot be had."""
        import torch
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            family = transformers.AutoModelForCausalLM
            if getattr(config, "vision_config", None) is not None:
                family = transformers.AutoModelForImageTextToText
            with torch.device("meta"):
                model = family.from_config(config)
        except (OSError, ValueError):
            return None
        text: Any = config.get_text_config()
        linears = [
            m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()
        ]
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return Size(
            parameters=sum(p.numel() for p in model.parameters()),
            adapter=sum(m.in_features + m.out_features for m in linears),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            key_values=2 * heads * width,
            vocabulary=text.vocab_size,
            dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
        )


def plan_lines(config: ExperimentConfig, nodes: Nodes = ONE_NODE) -> list[str]:
    """The plan of an experiment, a line per matter.

    Raises:
      ConfigError: the batch does not divide among the processes.
    """
    per_node = processes_per_node(config.engine)
    processes = per_node * nodes.count
    work = Work.of(config, processes)
    student = Size.of(model_folder(config.student.model, "student"))
    lines = [f"plan: {engine_text(config, per_node, nodes)}", f"batch: {batch_text(config, work, processes)}"]
    if student is None:
        lines.append(f"memory: no estimate, for the configuration of {config.student.model} cannot be read")
    else:
        parts = dict(memory_gb(config, student, work, processes))
        total = ", ".join(f"{name} {size:.2g}" for name, size in parts.items())
        bound = "" if config.train.max_prompt_length else " without prompts (train.max_prompt_length counts them)"
        lines.append(f"memory per process, estimated in GB{bound}: {sum(parts.values()):.2g} = {total}")
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    lines += [f"{name}: {teacher_text(block, config, student, processes)}" for name, block in blocks.items()]
    lines += [text for label, method in config.methods.items() for text in own_teachers(label, method, config, student)]
    for label, own in config.student.per_method.items():
        lines.append(f"{label}: {', '.join(f'{key} {value}' for key, value in own.chosen.items()) or 'as the others'}")
    return [*lines, f"rollouts: {rollouts_text(config)}"]


def engine_text(config: ExperimentConfig, per_node: int, nodes: Nodes) -> str:
    """Kind and number of the processes."""
    engine = config.engine
    where = "GPU" if gpus() else "CPU"
    if engine.kind == "single":
        return f"one process on a {where}"
    kind = "DDP" if engine.kind == "ddp" else f"DeepSpeed ZeRO-{engine.stage or 2}"
    if engine.config_file is not None:
        kind = f"DeepSpeed by {engine.config_file}"
    if engine.offload is not None:
        kind += f", {engine.offload} in CPU memory"
    machines = f" on this node, {nodes.count} nodes" if nodes.count > 1 else ""
    return f"{kind}, {per_node} {where} processes{machines}"


def batch_text(config: ExperimentConfig, work: Work, processes: int) -> str:
    """How the responses of a step are cut."""
    train = config.train
    text = f"{train.prompts_per_step} prompts x {train.generations} responses = {work.responses} per step"
    text += f" = {processes} processes x {work.accumulation} micro-batches x {work.micro_batch} responses"
    if config.engine.max_tokens_per_micro_batch is not None:
        text += f", sorted by length and cut at {config.engine.max_tokens_per_micro_batch} padded tokens"
    return text + (f", used {train.iterations} times" if train.iterations > 1 else "")


def memory_gb(config: ExperimentConfig, size: Size, work: Work, processes: int) -> Iterator[tuple[str, float]]:
    """The parts of a process's memory in GB."""
    engine, student, train = config.engine, config.student, config.train
    stage = (engine.stage or 2) if engine.kind == "deepspeed" else 0
    bf16 = bool(gpus()) if engine.bf16 is None else engine.bf16
    weight = 2 if stage and bf16 else BYTES.get(size.dtype if student.dtype == "auto" else student.dtype, 4)
    trained = size.parameters if student.lora is None else student.lora.r * size.adapter
    master = 4 if stage else 0
    if engine.offload != "all":
        yield "weights", size.parameters * weight / (processes if stage == 3 else 1) / GB
    yield "gradients", trained * weight / (processes if stage >= 2 else 1) / GB
    if engine.offload is None:
        yield "optimizer", trained * (2 * max(weight, master) + master) / (processes if stage else 1) / GB
    length = train.max_completion_length + (train.max_prompt_length or 0)
    rows = work.micro_batch
    tokens = rows * length
    if engine.max_tokens_per_micro_batch is not None:
        tokens = min(tokens, max(engine.max_tokens_per_micro_batch, length))  # a longer row goes alone
    kept = 2 if student.gradient_checkpointing else ACTIVATION_BYTES
    yield "activations", tokens * size.layers * size.hidden * kept * (1 if bf16 else 2) / GB
    chunk = CHUNK_TOKENS_GPU if gpus() else CHUNK_TOKENS
    yield "logits of a slice", chunk * size.vocabulary * 4 * LOGIT_COPIES / GB
    if engine.rollouts.engine == "transformers":
        yield "generation cache", work.per_process * length * size.layers * size.key_values * weight / GB


def teacher_text(block: OneTeacherConfig, config: ExperimentConfig, student: Size | None, processes: int) -> str:
    """Where a teacher runs and what it takes."""
    if isinstance(block, RecordedTeacherConfig):
        return f"scores recorded in {block.recorded}"
    if isinstance(block, SelfTeacherConfig):
        return self_text(block.own.sync, config, student)
    if isinstance(block, ServedTeacherConfig) and block.url is not None:
        return f"{block.model or 'a model'} served at {block.url}; nothing in these processes"
    size = Size.of(model_folder(block.model, "teacher")) if block.model else None
    dtype = getattr(block, "dtype", "auto")
    weights = None if size is None else size.parameters * BYTES.get(size.dtype if dtype == "auto" else dtype, 4) / GB
    if isinstance(block, LocalTeacherConfig):
        sharded = config.engine.kind == "deepspeed" and config.engine.stage == 3
        takes = "" if weights is None else f", {weights / (processes if sharded else 1):.2g} GB of weights"
        where = f"a share of it in each of {processes} processes" if sharded else "whole in every process"
        return f"{block.model}, {where}{takes}"
    takes = "" if weights is None else f" ({weights:.2g} GB of weights)"
    return f"{block.model} in a vLLM server that this run starts{takes}"


def self_text(sync: str, config: ExperimentConfig, student: Size | None) -> str:
    """What a self teacher holds beside the student."""
    if sync in ("live", "base"):
        return f"the student itself ({sync}); nothing beside it"
    trained = None
    if student is not None:
        trained = student.parameters if config.student.lora is None else config.student.lora.r * student.adapter
    return f"the student itself ({sync})" + (
        "" if trained is None else f", {trained * 4 / GB:.2g} GB of its own weights"
    )


def own_teachers(label: str, method: MethodConfig, config: ExperimentConfig, student: Size | None) -> Sequence[str]:
    """The self teachers that a method makes for itself."""
    syncs = {str(spec.options.get("sync", "live")) for spec in method.views.values() if spec.scorer == "self"}
    return [f"{label}: taught by {self_text(sync, config, student)}" for sync in sorted(syncs)]


def rollouts_text(config: ExperimentConfig) -> str:
    """What generates, and where."""
    rollouts = config.engine.rollouts
    if rollouts.engine == "transformers":
        return "by the training processes, with transformers"
    if rollouts.engine == "vllm_server":
        return f"by the vLLM server at {rollouts.url}"
    share = f"{rollouts.gpu_memory:.0%} of each GPU"
    return f"by vLLM inside the training processes, {share}, {rollouts.tensor_parallel} GPUs per copy"


def who_does(config: ExperimentConfig) -> dict[str, str]:
    """Part of a step -> who does it, for a run that stands still in it."""
    blocks = {} if config.teacher is None else teachers_of(config.teacher)
    served = [
        f"{block.model} at {block.url or 'the server of this run, see teacher.log'}"
        for block in blocks.values()
        if isinstance(block, ServedTeacherConfig)
    ]
    return {"generation": rollouts_text(config)} | ({"teacher": ", ".join(served)} if served else {})
