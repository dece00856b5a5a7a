"""The experiment file: everything that a run is told, as frozen settings of at most three levels.

What stands in the YAML is what its author chose to change; every default is here, in the method, or in the paper.
`hybrid.read_config` reads a file into these classes; `docs/settings.md` is generated from them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from hybrid.data import DataConfig, GymSource
from hybrid.methods import Method, MethodConfig
from hybrid.rewards import RewardConfig
from hybrid.teacher_config import ContextTemplate, Dtype, Settings, TeacherConfig
from hybrid.yaml_file import dump_yaml

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]

TINY = "tiny:"
"""Begins the name of an embedded model or data set."""


HELD_OUT_SEED = 1_000_003
"""Of generated held-out problems: others than those of the training, and the same for every seed of a comparison."""


def _samples(temperature: float) -> float:
    if temperature <= 0:
        raise ValueError(
            f"is {temperature}, greedy decoding, under which every log-prob would be divided by zero; "
            "train with samples, at a temperature above 0"
        )
    return temperature


ContextName = Literal["reference_answer", "wrong_answer", "sibling_solution", "reflection", "hint", "instruction"]


class LoraConfig(Settings):
    """Low-rank adapters in place of the full weights."""

    r: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(
        default=32.0, description="Scale of the adapters: the update is multiplied by alpha / r."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the adapters.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear", description="Names of the modules that get one, or `all-linear`."
    )


class OwnOptimizerConfig(Settings):
    """How one method moves the student's weights, where that differs from the others; null is as they do."""

    lr: PositiveFloat | None = Field(default=None, description="Learning rate at its highest.")
    scheduler: Literal["constant", "linear", "cosine"] | None = Field(
        default=None, description="How the learning rate falls after the warm-up."
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps in which the learning rate rises from 0.")
    weight_decay: float | None = Field(default=None, ge=0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: PositiveFloat | None = Field(
        default=None, description="Longer gradients are shortened to this length."
    )

    @property
    def chosen(self) -> dict[str, Any]:
        """What differs."""
        return self.model_dump(exclude_none=True)


class StudentConfig(Settings):
    """The model that is trained, and how its weights are moved."""

    model: str = Field(description="Folder or hub name, or `tiny:TASK` for an embedded one.")
    dtype: Dtype = Field(default="float32", description="Type of the weights that the optimizer moves.")
    lr: PositiveFloat = Field(default=1e-6, description="Learning rate at its highest.")
    scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after the warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which the learning rate rises from 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Longer gradients are shortened to this length.")
    gradient_checkpointing: bool = Field(default=False, description="Less memory for about a third more time.")
    lora: LoraConfig | None = Field(default=None, description="Train adapters only; null trains every weight.")
    chat_template_kwargs: Mapping[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, e.g. `{enable_thinking: false}`."
    )
    contexts: Mapping[ContextName, ContextTemplate] = Field(
        default_factory=dict,
        description="Own words of the contexts under which a method lets the student teach itself, each a text that "
        "ends with `{prompt}`; others have the wording of `teachers/contexts.py`.",
    )
    per_method: Mapping[Name, OwnOptimizerConfig] = Field(
        default_factory=dict,
        description="What a method that is compared has for itself, by its label: `{grpo: {lr: 3e-4}}`. "
        "`--set student.lr=...` is meant for every method and wins over it.",
    )


class TrainConfig(Settings):
    """How long, on how much, and with what samples."""

    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    prompts_per_step: int = Field(default=8, ge=1, description="Different prompts of one step.")
    generations: int = Field(default=8, ge=1, description="Responses per prompt.")
    iterations: int = Field(default=1, ge=1, description="How often the rollouts of a step are used.")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="Responses of one forward and backward per process; null takes a step's share in one.",
    )
    max_prompt_length: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of a prompt; null is what the student's context leaves. Longer ones are refused.",
    )
    max_completion_length: int = Field(default=256, ge=1, description="Most tokens of a response.")
    temperature: Annotated[float, AfterValidator(_samples)] = Field(
        default=1.0, description="Of the rollouts; above 0."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of the rollouts; 1 is all.")
    save_every: int = Field(default=50, ge=0, description="Steps between two checkpoints; 0 writes one at the end.")
    save_keep: int = Field(default=2, ge=1, description="How many checkpoints are kept, beside the best one.")
    trl: Mapping[str, Any] = Field(
        default_factory=dict,
        description="Any other field of TRL's `GRPOConfig`, e.g. `{mask_truncated_completions: true}`.",
    )


class EvaluateConfig(Settings):
    """Accuracy on held-out prompts, before, during and after the training."""

    every: int = Field(default=0, ge=0, description="Steps between two evaluations; 0 evaluates before and after only.")
    samples: int = Field(default=4, ge=1, description="Responses per prompt: the k of avg@k and of the largest pass@k.")
    prompts: int = Field(default=64, ge=1, description="How many held-out prompts: the first of the held-out set.")
    data: DataConfig | None = Field(
        default=None,
        description="The held-out set. Null is the split `eval` of an embedded task, other problems of the same "
        "reasoning-gym task (where it has enough), or the last `prompts` rows of any other source, which the training "
        "then leaves out. Prompts that are trained on too are counted in a warning.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Of the responses; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of the responses.")
    max_completion_length: int | None = Field(default=None, ge=1, description="Null is that of the training.")
    batch_size: int = Field(default=64, ge=1, description="Responses generated at once per process.")
    success_at: float = Field(default=1.0, description="A weighted reward of at least this is a right answer.")


class TrackingConfig(Settings):
    """What is written down, and where."""

    uri: str | None = Field(default=None, description="MLflow tracking URI; null is an SQLite file in `folder`.")
    experiment: str | None = Field(
        default=None, description="Name of the MLflow experiment; null is the experiment's `name`."
    )
    folder: str = Field(default="runs", description="Holds the runs: checkpoints, reports and the default store.")
    record_rollouts: bool = Field(
        default=True, description="Write every rollout as the JSON Lines that `hybrid explain` reads."
    )
    completions_every: int = Field(
        default=10, ge=0, description="Steps between two tables of completions; 0 writes none."
    )
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the MLflow runs.")
    note: str | None = Field(default=None, description="Description of the runs, in Markdown.")


class RolloutsConfig(Settings):
    """What generates the responses."""

    engine: Literal["transformers", "vllm_colocate", "vllm_server"] = Field(
        default="transformers", description="The training process itself, vLLM in its GPUs, or a vLLM server beside it."
    )
    url: str | None = Field(default=None, description="Address of the vLLM server, for `vllm_server`.")
    gpu_memory: float = Field(default=0.3, gt=0, lt=1, description="Share of each GPU that a colocated vLLM takes.")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share one copy of a colocated vLLM.")
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = Field(
        default="token_truncate",
        description="How the difference of vLLM's log-probs from the trainer's is corrected; masks of whole sequences "
        "would take the teacher's signal away with them.",
    )
    correction_max: PositiveFloat = Field(default=2.0, description="Largest importance weight of the correction.")

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if (self.url is not None) != (self.engine == "vllm_server"):
            raise ValueError(f"url belongs to engine: vllm_server, which needs it; the engine is {self.engine}")
        return self


class EngineConfig(Settings):
    """Machines and memory."""

    kind: Literal["single", "ddp", "deepspeed"] = Field(
        default="single", description="One process, replicas, or DeepSpeed ZeRO with sharded state."
    )
    processes: int | None = Field(default=None, ge=1, description="Processes per node; null is one per GPU.")
    stage: Literal[1, 2, 3] | None = Field(
        default=None, description="ZeRO stage: shards the optimizer, also gradients, also weights. Null is 2."
    )
    offload: Literal["optimizer", "all"] | None = Field(
        default=None, description="What DeepSpeed keeps in CPU memory: the optimizer's state, or also the weights."
    )
    config_file: str | None = Field(default=None, description="Own DeepSpeed JSON, in place of `stage` and `offload`.")
    bf16: bool | None = Field(default=None, description="Compute in bfloat16; null is yes on a GPU and no on a CPU.")
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="Padded tokens, prompt and completion, of a forward and backward of the student, and of a forward "
        "of a local teacher: responses of a micro-batch (see `train.micro_batch`) are sorted by length and cut. One "
        "that is longer goes alone. Null for no such limit.",
    )
    stall_after_s: PositiveFloat = Field(
        default=1800.0,
        description="Seconds without any progress after which the run is ended, with exit code 75, the reason and the "
        "stacks in `stalled_RANK.txt`.",
    )
    bad_gradients: int = Field(
        default=10,
        ge=1,
        description="Updates with NaN or infinite gradients are left out; so many in a row stop the run.",
    )
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="What generates the responses.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        only_deepspeed = {"stage": self.stage, "offload": self.offload, "config_file": self.config_file}
        chosen = [key for key, value in only_deepspeed.items() if value is not None]
        if self.kind != "deepspeed" and chosen:
            raise ValueError(f"{chosen[0]} belongs to kind: deepspeed; the kind is {self.kind}")
        if self.config_file is not None and len(chosen) > 1:
            raise ValueError("config_file takes the place of stage and offload; leave them out")
        if self.kind == "single" and self.processes not in (None, 1):
            raise ValueError(f"kind: single is one process; for {self.processes} write kind: ddp or kind: deepspeed")
        return self


class ExperimentConfig(Settings):
    """One experiment: a student, what it learns from, and by which method or methods."""

    name: Name = Field(description="Names the run's folder and its MLflow experiment.")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Of the data order, the rollouts and everything else by chance."
    )
    student: StudentConfig = Field(description="The model that is trained.")
    teacher: TeacherConfig | None = Field(default=None, description="Who scores the student's tokens; null is nobody.")
    method: Method = Field(description="The objective, e.g. `{name: opdvr}`; see `hybrid methods`.")
    compare: tuple[Method, ...] = Field(
        default=(), description="Other methods, trained from the same start for comparison."
    )
    data: DataConfig = Field(description="The prompts.")
    rewards: tuple[RewardConfig, ...] = Field(default=(), description="Verifiers; their weighted sum is the reward.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="How long, on how much, and with what samples.")
    evaluate: EvaluateConfig | None = Field(default=None, description="Held-out accuracy; null is none.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="What is written down, and where.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Machines and memory.")

    @property
    def methods(self) -> dict[str, MethodConfig]:
        """Every method of the experiment by its label: its name, with a number where a name comes again."""
        labelled: dict[str, MethodConfig] = {}
        for method in (self.method, *self.compare):
            if method not in labelled.values():
                again = sum(other.name == method.name for other in labelled.values())
                labelled[f"{method.name}_{again + 1}" if again else method.name] = method
        return labelled

    def for_method(self, label: str) -> "ExperimentConfig":
        """This experiment with one of its methods alone, and with the settings that this one has for itself."""
        own = self.student.per_method.get(label, OwnOptimizerConfig())
        student = self.student.model_copy(update={**own.chosen, "per_method": {}})
        return self.model_copy(update={"method": self.methods[label], "compare": (), "student": student})


def held_out(config: ExperimentConfig) -> DataConfig | None:
    """Where the held-out prompts come from; None where nothing is evaluated.

    Where `splits_off(config)`, they are the last rows of the training's own source.
    """
    if config.evaluate is None:
        return None
    if config.evaluate.data is not None:
        return config.evaluate.data
    source = config.data.source
    if isinstance(source, GymSource):
        seed = HELD_OUT_SEED + (source.seed or 0)
        other = source.model_copy(update={"seed": seed, "size": config.evaluate.prompts})
        return config.data.model_copy(update={"source": other, "limit": None})
    if source.startswith(TINY):
        return config.data.model_copy(update={"split": "eval", "limit": config.evaluate.prompts})
    return config.data


def splits_off(config: ExperimentConfig) -> bool:
    """Whether the held-out prompts are the last rows of the training's own source; the training leaves them out."""
    return config.evaluate is not None and held_out(config) is config.data


def resolved_yaml(config: ExperimentConfig) -> str:
    """The experiment with every default written out; reading it gives the same experiment."""
    return dump_yaml(config.model_dump(mode="json", by_alias=True))
