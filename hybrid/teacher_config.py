"""Settings of the teachers: one class per way of being asked, told apart by the keys that stand in the YAML.

teacher: {model: Qwen/Qwen3-8B}                             a model of this process
teacher: {model: Qwen/Qwen3-8B, url: "http://node2:8000"}   a vLLM server; several addresses are replicas
teacher: {model: Qwen/Qwen3-8B, serve: auto}                a vLLM server that the run starts and stops
teacher: {self: {sync: snapshot, every: 10}, context: {...}}   the student itself, under a privileged context
teacher: {recorded: scores.jsonl}                           scores of an earlier run
teacher: {teachers: {math: {...}, code: {...}}, by: topic}  several, by a column or by weights
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, PositiveFloat, Tag, model_validator


class Settings(BaseModel):
    """A group of settings: frozen, and without room for a key that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _is_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"is no server address: {url!r}; write http://host:port")
    if parts.username or parts.password:
        raise ValueError("holds a password; put the key into the environment variable that api_key_env names")
    return url.rstrip("/")


Address = Annotated[str, AfterValidator(_is_address)]


def _ends_with_prompt(template: str) -> str:
    if template.count("{prompt}") != 1 or not template.rstrip().endswith("{prompt}"):
        raise ValueError("must end with {prompt}, so that both sides continue the same text")
    return template


ContextTemplate = Annotated[str, AfterValidator(_ends_with_prompt)]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


_ALIGN = (
    "The teacher has another tokenizer: it scores the student's text with its own, and log-probs are brought back to "
    "the student's tokens by bytes. Only for methods of sampled tokens."
)


ContextKind = Literal["answer", "wrong_answer", "sibling", "reflection", "hint", "instruction", "degraded", "column"]


class ContextConfig(Settings):
    """What this teacher sees beside the student's prompt; the wordings are those of `teachers/contexts.py`."""

    kind: ContextKind = Field(
        description="`answer`: the reference answer, or a `wrong_answer` in the same words; `sibling`: another "
        "response that was right; `reflection`: one that was wrong, to be corrected; `hint` and `instruction`: "
        "the text of that column; `degraded`: images or text with their detail gone; `column`: another prompt."
    )
    template: ContextTemplate | None = Field(
        default=None,
        description="Own words: a text that ends with `{prompt}`, with `{answer}`, `{solution}`, `{attempt}` or any "
        "column in braces before it.",
    )
    column: str | None = Field(
        default=None, description="Column of the answer, of the degraded prompt or of the other prompt."
    )
    ratio: float | None = Field(
        default=None, gt=0, le=1, description="Share of detail that `degraded` keeps; null is 0.1."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ratio is not None and self.kind != "degraded":
            raise ValueError(f"ratio belongs to the kind degraded; the kind is {self.kind}")
        if self.template is not None and self.kind in ("degraded", "column"):
            raise ValueError(f"template is a text before the prompt, which the kind {self.kind} has not")
        if self.kind == "column" and self.column is None:
            raise ValueError("name the column that holds the teacher's prompt: column: NAME")
        return self


class PromptConfig(Settings):
    """How this teacher's prompts are rendered, where it differs from the student."""

    system: str | None = Field(default=None, description="System message, in place of the data's; null leaves that.")
    chat_template: str | None = Field(default=None, description="File with a Jinja template; null is the tokenizer's.")
    chat_template_kwargs: Mapping[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, e.g. `{enable_thinking: false}`."
    )
    ends_differently: bool = Field(
        default=False, description="The teacher's prompt is meant to end otherwise than the student's."
    )


_CACHE = (
    "Folder on this machine in which scores are kept by their content, for later runs too: each sequence is scored "
    "once. Not for whole distributions."
)
_TEMPERATURE = "At which its log-probs hold; null is `train.temperature`, the only right one for most."


class _Teacher(Settings):
    context: ContextConfig | None = Field(
        default=None, description="What the teacher sees beside the prompt; null is nothing."
    )
    prompt: PromptConfig | None = Field(
        default=None, description="How its prompts are rendered; null is like the student's."
    )


class LocalTeacherConfig(_Teacher):
    """A model in the training process."""

    model: str = Field(description="Folder or hub name, or `tiny:TASK` for an embedded one.")
    dtype: Dtype = Field(default="auto", description="Type of the weights; `auto` is that of the checkpoint.")
    device: str | None = Field(default=None, description="Where it runs, e.g. `cuda:1`; null is beside the student.")
    quantization: Literal["4bit", "8bit"] | None = Field(default=None, description="Through bitsandbytes, on a GPU.")
    batch_size: int = Field(default=8, ge=1, description="Rows of one forward.")
    token_budget: int | None = Field(
        default=None, ge=1, description="Padded tokens of one forward; null is `engine.max_tokens_per_micro_batch`."
    )
    temperature: PositiveFloat | None = Field(default=None, description=_TEMPERATURE)
    align: bool = Field(default=False, description=_ALIGN)
    cache: str | None = Field(default=None, description=_CACHE)


class RequestsConfig(Settings):
    """How a server is asked."""

    window: int = Field(default=16, ge=1, description="Requests on their way at once.")
    timeout_s: PositiveFloat = Field(default=60.0, description="Seconds until a request counts as failed.")
    retries: int = Field(default=3, ge=0, description="How often a row is asked for again, with growing waits.")
    ca_file: str | None = Field(default=None, description="Certificates to trust in place of the system's.")
    compress: bool | None = Field(
        default=None, description="Ask for compressed replies; null is yes unless the server is on this machine."
    )


class ServerConfig(Settings):
    """The server that a run starts for itself; it listens on this machine alone and wants a random key."""

    device: Literal["auto", "cuda", "cpu"] = Field(default="auto", description="`auto` is a GPU where there is one.")
    gpus: str | None = Field(default=None, description="GPUs of the server, e.g. `6,7`; null leaves it all.")
    dtype: Dtype = Field(default="auto", description="Of the weights; `auto` is the checkpoint's, float32 on a CPU.")
    max_model_len: int | None = Field(
        default=None, ge=2, description="Prompt, completion and one token more; null is what the run needs."
    )
    port: int = Field(default=0, ge=0, lt=65536, description="0 takes a free one.")
    start_timeout_s: PositiveFloat = Field(default=900.0, description="Seconds until it must score.")
    flags: tuple[str, ...] = Field(default=(), description="More arguments of `vllm serve`.")


class ServedTeacherConfig(_Teacher):
    """A stock `vllm serve`, asked over HTTP."""

    model: str = Field(description="Folder or hub name, as the server knows it; its tokenizer is checked too.")
    url: Address | tuple[Address, ...] | None = Field(
        default=None, description="Address of the server, or of its replicas."
    )
    serve: Literal["auto"] | ServerConfig | None = Field(
        default=None, description="The run starts the server itself and stops it: `auto`, or its settings."
    )
    temperature: PositiveFloat | None = Field(default=None, description=_TEMPERATURE)
    on_failure: Literal["mask", "stop"] = Field(
        default="mask",
        description="A row that cannot be scored loses its teacher term and is counted, or the run stops.",
    )
    api_key_env: str = Field(default="HYBRID_TEACHER_API_KEY", description="Environment variable of the API key.")
    requests: RequestsConfig = Field(default_factory=RequestsConfig, description="How the server is asked.")
    candidates: bool = Field(
        default=False,
        description="The server scores ids that the student chose (vLLM's `/inference/v1/generate`, GPU only).",
    )
    align: bool = Field(default=False, description=_ALIGN)
    cache: str | None = Field(default=None, description=_CACHE)

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if (self.url is None) == (self.serve is None):
            raise ValueError("needs either url, for a server that runs, or serve: auto, for one that is started")
        if self.url == ():
            raise ValueError("url names no server")
        return self


class SelfConfig(Settings):
    """Which weights of the student teach."""

    sync: Literal["live", "snapshot", "ema", "base"] = Field(
        description="`live`: the weights of this moment; `snapshot`: a copy, renewed every `every` steps; `ema`: a "
        "running mean; `base`: the weights under the LoRA adapter."
    )
    every: int | None = Field(default=None, ge=1, description="Steps between two snapshots; null is 10.")
    decay: float | None = Field(
        default=None, ge=0, lt=1, description="Share of the old mean that an EMA keeps; null is 0.95."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.every is not None and self.sync != "snapshot":
            raise ValueError(f"every belongs to sync: snapshot; sync is {self.sync}")
        if self.decay is not None and self.sync != "ema":
            raise ValueError(f"decay belongs to sync: ema; sync is {self.sync}")
        return self


class SelfTeacherConfig(_Teacher):
    """The student itself."""

    own: SelfConfig = Field(alias="self", description="Which weights of the student teach.")


class RecordedTeacherConfig(_Teacher):
    """Scores that were written down before."""

    recorded: str = Field(description="File of recorded scores.")


_KINDS = (
    ("teachers", "several teachers"),
    ("self", "self teacher"),
    ("own", "self teacher"),
    ("recorded", "recorded teacher"),
)


def _kind_of_teacher(value: Any) -> str:
    # What is no mapping is refused by the class, in words; any class will do.
    keys = (
        set(value)
        if isinstance(value, Mapping)
        else {name for name, _ in value}
        if isinstance(value, BaseModel)
        else set()
    )
    for key, kind in _KINDS:
        if key in keys:
            return kind
    return "served teacher" if keys & {"url", "serve"} else "local teacher"


OneTeacherConfig = Annotated[
    Annotated[LocalTeacherConfig, Tag("local teacher")]
    | Annotated[ServedTeacherConfig, Tag("served teacher")]
    | Annotated[SelfTeacherConfig, Tag("self teacher")]
    | Annotated[RecordedTeacherConfig, Tag("recorded teacher")],
    Discriminator(_kind_of_teacher),
]


class RoutedTeacherConfig(Settings):
    """Several teachers: one per row, chosen by a column, or all of them, with weights."""

    teachers: Mapping[str, OneTeacherConfig] = Field(min_length=1, description="The teachers by name.")
    by: str | None = Field(default=None, description="Column whose value is the name of the row's teacher.")
    default: str | None = Field(
        default=None, description="Teacher of rows whose value names none; null stops the run there."
    )
    weights: Mapping[str, PositiveFloat] | None = Field(
        default=None, description="Shares of the teachers, all asked per row."
    )

    @model_validator(mode="after")
    def _chooses(self) -> Self:
        if (self.by is None) == (self.weights is None):
            raise ValueError("needs either by, a column, or weights, to say which teacher a row gets")
        named = {*(self.weights or ()), *([] if self.default is None else [self.default])}
        if unknown := sorted(named - set(self.teachers)):
            raise ValueError(f"names no teacher of this list: {unknown[0]!r}; there are {', '.join(self.teachers)}")
        if self.default is not None and self.by is None:
            raise ValueError("default belongs to by, a column")
        if self.weights is not None and (missing := sorted(set(self.teachers) - set(self.weights))):
            raise ValueError(f"weights has no {missing[0]!r}; give every teacher one")
        return self


TeacherConfig = Annotated[
    Annotated[LocalTeacherConfig, Tag("local teacher")]
    | Annotated[ServedTeacherConfig, Tag("served teacher")]
    | Annotated[SelfTeacherConfig, Tag("self teacher")]
    | Annotated[RecordedTeacherConfig, Tag("recorded teacher")]
    | Annotated[RoutedTeacherConfig, Tag("several teachers")],
    Discriminator(_kind_of_teacher),
]


def teachers_of(config: TeacherConfig) -> dict[str, OneTeacherConfig]:
    """Every single teacher of a setting by name; a lone one is called `teacher`."""
    return dict(config.teachers) if isinstance(config, RoutedTeacherConfig) else {"teacher": config}
