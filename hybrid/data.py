"""Prompts: from a JSON Lines or parquet file, a `datasets` folder or name, a reasoning-gym task, or an embedded task.

The trainer gets a column `prompt` (a text, or a list of chat messages) and every other column as it stands in the
source, since rewards and teachers read them by name.
"""

import difflib
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import orjson
import pyarrow as pa
from datasets.exceptions import DatasetsError
from datasets.table import InMemoryTable
from pyarrow import parquet
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hybrid.errors import DataError
from hybrid.pictures import PICTURE_COLUMNS, encode_prompts, tokenizer_of
from hybrid.rewards.gym import GYM_COLUMN, gym_record

Builder = Callable[["DataConfig", int], datasets.Dataset]

_TRL_NAMES = {"completion_ids", "completions", "environments", "log_extra", "log_metric", "prompts", "trainer_state"}

RESERVED_COLUMNS = frozenset(_TRL_NAMES | {"advantages", "completion", "rewards"})
"""Names under which TRL hands its own values to reward functions, or drops a column without a word."""


class GymSource(BaseModel):
    """A task of reasoning-gym, generated on the spot; its problems are scored by the reward `reasoning_gym`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(description="Registered name of the task, e.g. `chain_sum`.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the task, e.g. `{min_terms: 2, max_terms: 3}`."
    )
    size: int = Field(default=500, ge=1, description="How many problems to generate.")
    seed: int | None = Field(
        default=None,
        description="Seed of the problems; null takes the run's seed. Held-out problems want a seed of their own.",
    )


class DataConfig(BaseModel):
    """Where prompts come from and how they are put to the student."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str | GymSource = Field(
        description="A `.jsonl` or `.parquet` file, a folder written by `Dataset.save_to_disk`, a folder or hub name "
        "that `datasets.load_dataset` takes, `tiny:TASK` for an embedded task, or a reasoning-gym task as "
        "`{task: NAME, params: {...}, size: N}`."
    )
    subset: str | None = Field(
        default=None, description="Configuration of a hub data set, e.g. `main` of `openai/gsm8k`."
    )
    split: str = Field(default="train", description="Split of a `datasets` folder or name; files have none.")
    prompt_column: str = Field(
        default="prompt", description="Column of the prompt: a text, or with `chat: true` also a list of chat messages."
    )
    template: str | None = Field(
        default=None,
        description="Text of the prompt with columns in braces, e.g. `Question: {question}`; replaces `prompt_column`. "
        "Write braces that stand for themselves twice: `\\boxed{{}}`.",
    )
    system: str | None = Field(
        default=None, description="System message that is put before every prompt; needs `chat: true`."
    )
    chat: bool = Field(
        default=False,
        description="Give prompts as chat messages, which the student's chat template renders; else as plain text.",
    )
    columns: tuple[str, ...] | None = Field(
        default=None,
        description="Columns to keep beside the prompt; null keeps all. Rewards and teachers see the kept ones.",
    )
    limit: int | None = Field(default=None, ge=1, description="Use only so many rows, counted after shuffling.")
    shuffle_seed: int | None = Field(
        default=None, ge=0, description="Shuffle the rows once with this seed; null keeps the order of the source."
    )

    @field_validator("template")
    @classmethod
    def _names_columns(cls, template: str | None) -> str | None:
        if template is not None:
            for name in _fields(template):
                if not name.isidentifier():
                    raise ValueError(
                        f"has the placeholder {{{name}}}, which is no column name; write braces that stand for "
                        "themselves twice"
                    )
        return template

    @model_validator(mode="after")
    def _system_needs_chat(self) -> "DataConfig":
        if self.system is not None and not self.chat:
            raise ValueError("system needs chat: true; without chat put the text into template")
        return self


def load_prompts(config: DataConfig, *, seed: int, builders: Mapping[str, Builder] | None = None) -> datasets.Dataset:
    """Loads the prompts of a run.

    Args:
      config: what to load.
      seed: the run's seed, for sources that are generated.
      builders: makers of embedded sources by the word before the colon (`tiny` serves `tiny:chain_sum`); each takes
        the config and the seed and returns rows with the columns that the config names.

    Returns:
      A data set in memory or mapped from disk, with `prompt` first and the kept columns after it.

    Raises:
      DataError: the source is missing, malformed or empty, a column is missing or has a reserved name, or a row has no
        usable prompt. Names the source, the row (for JSON Lines the line) and the column.
    """
    rows, where = _source(config, seed, builders or {})
    if len(rows) == 0:
        raise DataError(f"{where.name}: the data set is empty; at least one prompt is needed")
    needed = [config.prompt_column] if config.template is None else sorted(set(_fields(config.template)))
    kept = [name for name in rows.column_names if name != "prompt"] if config.columns is None else list(config.columns)
    for name in dict.fromkeys([*needed, *kept]):
        if name not in rows.column_names:
            near = difflib.get_close_matches(name, rows.column_names, n=1)
            hint = f"did you mean '{near[0]}'? It has" if near else "it has"
            way = " (data.prompt_column names another)" if name == "prompt" and config.template is None else ""
            raise DataError(f"{where.name}: no column '{name}'; {hint}: {', '.join(rows.column_names)}{way}")
    if reserved := sorted(RESERVED_COLUMNS.intersection(kept)):
        raise DataError(
            f"{where.name}: column '{reserved[0]}' has a name that the trainer uses itself, so no reward would "
            "ever see it; rename it, or leave it out with data.columns"
        )
    if not config.chat and (pictures := sorted(set(PICTURE_COLUMNS).intersection(kept))):
        raise DataError(
            f"{where.name}: pictures ('{pictures[0]}') need data.chat: true; or leave them out with data.columns"
        )
    if config.template is None and config.prompt_column != "prompt" and "prompt" in rows.column_names:
        raise DataError(
            f"{where.name}: column 'prompt' would be replaced by '{config.prompt_column}'; set "
            "prompt_column: prompt, or rename one of them"
        )
    order = np.arange(len(rows))
    if config.shuffle_seed is not None:
        order = np.random.default_rng(config.shuffle_seed).permutation(len(rows))
    order = order[: config.limit]
    records = _taken(rows.select_columns(needed), order).to_list() if needed else [{}] * len(order)
    prompts = [_prompt(config, record, where(int(row))) for row, record in zip(order, records, strict=True)]
    kept = [name for name in kept if name != "prompt"]
    others = _taken(rows.select_columns(kept), order) if kept else None
    prompt_rows = datasets.Dataset.from_dict({"prompt": prompts})
    return prompt_rows if others is None else datasets.concatenate_datasets([prompt_rows, others], axis=1)


def check_prompt_lengths(
    dataset: datasets.Dataset,
    tokenizer: Any,
    limit: int,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Renders every prompt as the trainer will and refuses one that is too long or starts with two BOS tokens.

    Args:
      dataset: what `load_prompts` returned.
      tokenizer: the student's tokenizer or processor.
      limit: most tokens that a prompt may have.
      chat_template_kwargs: what the trainer passes to the chat template, e.g. `{"enable_thinking": False}`.

    Returns:
      The length of the longest prompt in tokens.

    Raises:
      DataError: names the first bad row, its length and the limit; or the tokenizer has no chat template.
    """
    longest, arguments = 0, chat_template_kwargs or {}
    has_pictures = bool(set(PICTURE_COLUMNS).intersection(dataset.column_names))
    for row, prompt in enumerate(dataset["prompt"]):
        ids = _prompt_ids(prompt, tokenizer, arguments)
        if has_pictures:
            ids = encode_prompts(tokenizer, [dataset[row]], arguments)["input_ids"][0].tolist()
        if len(ids) > limit:
            raise DataError(
                f"prompt {row} has {len(ids)} tokens and the limit is {limit}; raise the limit, shorten the prompt, or "
                f"leave the row out. It begins: {_beginning(prompt)}"
            )
        bos = getattr(tokenizer_of(tokenizer), "bos_token_id", None)
        if bos is not None and list(ids[:2]) == [bos, bos]:
            raise DataError(
                f"prompt {row} starts with two BOS tokens: its text or the chat template writes "
                f"{tokenizer.bos_token!r} and the tokenizer adds another; remove it from the text, or set chat: true "
                f"with the messages before rendering. It begins: {_beginning(prompt)}"
            )
        longest = max(longest, len(ids))
    return longest


class _Where:
    """Names a row of a source in the words of its user."""

    def __init__(self, name: str, lines: Sequence[int] | None = None) -> None:
        self.name = name
        self._lines = lines

    def __call__(self, row: int) -> str:
        return f"{self.name}, row {row}" if self._lines is None else f"{self.name}, line {self._lines[row]}"


def _source(config: DataConfig, seed: int, builders: Mapping[str, Builder]) -> tuple[datasets.Dataset, _Where]:
    if isinstance(config.source, GymSource):
        return _gym_rows(config.source, seed), _Where(f"reasoning-gym task '{config.source.task}'")
    source, where = config.source, _Where(config.source)
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".parquet") or source.startswith(("/", "./", "../", "~")):
        if not path.exists():
            raise DataError(f"{source}: no such file or folder (looked in {Path.cwd()})")
        if path.suffix == ".jsonl":
            rows, lines = _jsonl_rows(path, source)
            return rows, _Where(source, lines)
        if path.suffix == ".parquet":
            return _parquet_rows(path, source), where
    if path.is_file():
        kind = path.suffix.removeprefix(".").replace("tsv", "csv")
        kind = kind if kind in ("csv", "json", "arrow") else "text"
        raise DataError(
            f"{source}: a file of prompts ends in .jsonl or .parquet; to make one: "
            f"datasets.load_dataset('{kind}', data_files='{source}', split='train').to_parquet('{path.stem}.parquet')"
        )
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_rows(path, config.split), where
    prefix, colon, _ = source.partition(":")
    if colon and not path.exists():
        if prefix not in builders:
            raise DataError(f"{source}: nothing serves '{prefix}:'; known: {', '.join(sorted(builders)) or 'none'}")
        return builders[prefix](config, seed), where
    return _hub_rows(config, source, is_folder=path.is_dir()), where


def _jsonl_rows(path: Path, name: str) -> tuple[datasets.Dataset, list[int]]:
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not text:
                continue
            try:
                record = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{name}, line {number}: no valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{name}, line {number}: a {type(record).__name__} where a JSON object is due")
            records.append(record)
            lines.append(number)
    keys = list(dict.fromkeys(key for record in records for key in record))
    table = {}
    for key in keys:
        values = [record.get(key) for record in records]
        try:
            table[key] = pa.array(values)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(f"{_Where(name, lines)(_odd_row(values))}, key '{key}': {error}") from error
    return datasets.Dataset(InMemoryTable.from_pydict(table)), lines


def _odd_row(values: Sequence[Any]) -> int:
    """The first row from which on the values do not fit into one column."""
    low, high = 1, len(values)
    while low < high:
        middle = (low + high) // 2
        try:
            pa.array(values[:middle])
            low = middle + 1
        except (pa.ArrowException, OverflowError):
            high = middle
    return low - 1


def _parquet_rows(path: Path, name: str) -> datasets.Dataset:
    try:
        return datasets.Dataset(InMemoryTable(parquet.read_table(path)))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: no readable parquet file: {error}") from error


def _saved_rows(path: Path, split: str) -> datasets.Dataset:
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: no readable folder of `save_to_disk`: {error}") from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise DataError(f"{path}: no split '{split}'; it has: {', '.join(map(str, saved))}")
    return saved[split]


def _hub_rows(config: DataConfig, name: str, *, is_folder: bool) -> datasets.Dataset:
    try:
        rows = datasets.load_dataset(name, config.subset, split=config.split)
    except (OSError, ValueError, DatasetsError) as error:
        what = f"{name}: the folder cannot be read as a data set"
        if not is_folder:
            what = f"{name}: there is no such file or folder here, and the hub does not give a data set of this name"
        raise DataError(
            f"{what} (subset {config.subset or 'not set'}, split '{config.split}'): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(rows, datasets.Dataset):
        raise DataError(f"{name}: split '{config.split}' is a {type(rows).__name__} where one table of rows is due")
    return rows


def _gym_rows(source: GymSource, seed: int) -> datasets.Dataset:
    import reasoning_gym.factory

    if source.task not in reasoning_gym.factory.DATASETS:
        near = difflib.get_close_matches(source.task, reasoning_gym.factory.DATASETS, n=3)
        raise DataError(f"reasoning-gym has no task '{source.task}'; near: {', '.join(near) or 'none'}")
    if clash := sorted({"seed", "size"}.intersection(source.params)):
        raise DataError(f"reasoning-gym task '{source.task}': set {clash[0]} beside params, not in it")
    params = {**source.params, "seed": seed if source.seed is None else source.seed, "size": source.size}
    try:
        entries = list(reasoning_gym.factory.create_dataset(source.task, **params))
        return datasets.Dataset.from_dict(
            {
                "prompt": [entry["question"] for entry in entries],
                "answer": [entry["answer"] for entry in entries],
                GYM_COLUMN: [gym_record(source.task, params, entry) for entry in entries],
            }
        )
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"reasoning-gym task '{source.task}' does not take the params {source.params}: "
            f"{type(error).__name__}: {error}"
        ) from error


def has_columns(rows: datasets.Dataset, wanted: Sequence[tuple[str, str]], where: str = "") -> None:
    """Makes sure that each wanted column is there.

    Raises:
      DataError: names the first that is not, and who wants it.
    """
    for column, who in wanted:
        if column not in rows.column_names:
            has = ", ".join(rows.column_names)
            raise DataError(f"{where}has no column '{column}', which {who} needs; it has: {has}")


def has_answers(rows: datasets.Dataset, columns: Sequence[tuple[str, str]], where: str = "") -> None:
    """Makes sure that no row lacks what a reward reads, which would stop a run at the step that draws it.

    Args:
      rows: the prompts.
      columns: each with who reads it.
      where: what messages begin with.

    Raises:
      DataError: names the column, who wants it, and the first row without.
    """
    has_columns(rows, columns, where)
    for column, who in columns:
        values = rows.select_columns([column]).with_format("arrow")[:].column(0)  # pyright: ignore
        if values.null_count:
            first = values.is_null().to_pylist().index(True)
            raise DataError(
                f"{where}'{column}', which {who} needs, is missing or null in {values.null_count} of {len(rows)} rows, "
                f"first in row {first + 1}; give it a value there, or leave these rows out"
            )


def _fields(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"has unpaired braces ({error}); write braces that stand for themselves twice") from error


def _taken(rows: datasets.Dataset, order: np.ndarray) -> datasets.Dataset:
    """The rows in that order, without an index mapping and without cache files."""
    if np.array_equal(order, np.arange(len(rows))):
        return rows
    table = rows.with_format("arrow").select(order)[:]
    return datasets.Dataset(InMemoryTable(table), info=datasets.DatasetInfo(features=rows.features))


def _prompt(config: DataConfig, values: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    for name, value in values.items():
        if value is None:
            raise DataError(f"{where}: '{name}' is missing or null, and the prompt needs it")
    prompt = values[config.prompt_column] if config.template is None else config.template.format_map(values)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is blank")
        if not config.chat:
            return prompt
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = _messages(prompt, config, where)
    if config.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{where}: the prompt has a system message of its own, and data.system is set; keep one of them"
        )
    return [{"role": "system", "content": config.system}, *messages]


def _messages(prompt: Any, config: DataConfig, where: str) -> list[dict[str, Any]]:
    key = config.prompt_column
    if not isinstance(prompt, list):
        raise DataError(f"{where}: '{key}' is a {type(prompt).__name__}; a prompt is a text or a list of chat messages")
    if not config.chat:
        raise DataError(f"{where}: '{key}' is a list of chat messages; set chat: true")
    if not prompt:
        raise DataError(f"{where}: '{key}' is an empty list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message.get("content") is None:
            raise DataError(f"{where}: '{key}' has a message without role and content: {message!r:.80}")
    return prompt


def _prompt_ids(prompt: Any, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> Sequence[int]:
    if isinstance(prompt, str):
        return tokenizer(text=[prompt])["input_ids"][0]
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the prompts are chat messages and the tokenizer has no chat template; set data.chat: false")
    return tokenizer.apply_chat_template(
        [prompt], add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )["input_ids"][0]


def _beginning(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"{text!r:.80}"
