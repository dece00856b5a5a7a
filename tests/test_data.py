import json

import datasets
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from hybrid.data import RESERVED_COLUMNS, DataConfig, check_prompt_lengths, has_answers, load_prompts
from hybrid.errors import DataError
from hybrid.rewards import ReasoningGymConfig

ROWS = [{"prompt": f"What is {n}+{n}?", "answer": str(2 * n), "level": n} for n in range(6)]


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return str(path)

    return write


@pytest.fixture
def tokenizer():
    """Words are tokens; the tokenizer writes a BOS token and so does the text of a careless template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<unk>", "<s>", "user", "system", "assistant", "What", "is", "it", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def load(source, builders=None, seed=0, **settings):
    return load_prompts(DataConfig(source=source, **settings), seed=seed, builders=builders)


def test_jsonl_keeps_every_column(jsonl):
    rows = load(jsonl(*ROWS[:1], "", *ROWS[1:]))
    assert rows.column_names == ["prompt", "answer", "level"]
    assert rows.to_list() == ROWS


def test_parquet_a_saved_folder_and_a_folder_of_files_give_the_same(tmp_path, jsonl):
    rows = datasets.Dataset.from_list(ROWS)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    jsonl(*ROWS, name="folder/train.jsonl")
    for name in ("rows.parquet", "saved", "splits", "folder"):
        assert load(str(tmp_path / name)).to_list() == ROWS
    assert load(str(tmp_path / "splits"), split="test").to_list() == ROWS[:2]
    with pytest.raises(DataError, match="no split 'dev'; it has: train, test"):
        load(str(tmp_path / "splits"), split="dev")


def test_a_template_names_columns_and_keeps_doubled_braces(jsonl):
    rows = load(jsonl(*ROWS), template="Level {level}: {prompt} End with \\boxed{{}}.")
    assert rows["prompt"][2] == "Level 2: What is 2+2? End with \\boxed{}."
    assert rows["answer"][2] == "4"


def test_another_prompt_column_is_kept_too(jsonl):
    rows = load(jsonl({"question": "q", "answer": 1}), prompt_column="question")
    assert rows.to_list() == [{"prompt": "q", "question": "q", "answer": 1}]


def test_chat_prompts_from_text_and_from_messages(jsonl):
    text = load(jsonl(*ROWS), chat=True, system="Add.")
    user = {"role": "user", "content": "What is 1+1?"}
    assert text["prompt"][1] == [{"role": "system", "content": "Add."}, user]
    assert load(jsonl({"prompt": [user]}), chat=True)["prompt"][0] == [user]
    with pytest.raises(DataError, match=r"line 1: 'prompt' is a list of chat messages; set chat: true"):
        load(jsonl({"prompt": [user]}))
    with pytest.raises(DataError, match="line 1: the prompt has a system message of its own"):
        load(jsonl({"prompt": [{"role": "system", "content": "x"}, user]}), chat=True, system="Add.")
    with pytest.raises(DataError, match="line 2: 'prompt' has a message without role and content"):
        load(jsonl({"prompt": [user]}, {"prompt": [{"role": "user"}]}), chat=True)


def test_shuffle_then_limit(jsonl):
    path = jsonl(*ROWS)
    first = load(path, shuffle_seed=1, limit=4)["level"][:]
    assert first == load(path, shuffle_seed=1)["level"][:4]
    assert first != load(path, shuffle_seed=2, limit=4)["level"][:]
    assert load(path, limit=2)["level"][:] == [0, 1]
    shuffled = load(path, shuffle_seed=1)
    assert all(row in ROWS for row in shuffled.to_list())
    assert sorted(shuffled["level"][:]) == list(range(6))


def test_only_some_columns(jsonl):
    path = jsonl(*ROWS)
    assert load(path, columns=["level"]).column_names == ["prompt", "level"]
    assert load(path, columns=[]).column_names == ["prompt"]
    assert load(path, columns=["prompt", "answer"]).column_names == ["prompt", "answer"]


def test_the_answer_reaches_the_reward_and_reserved_names_are_refused(jsonl):
    path = jsonl({"prompt": "p", "completion": "c", "answer": "a", "rewards": 1})
    with pytest.raises(DataError, match=r"train.jsonl: column 'completion' has a name that the trainer uses itself"):
        load(path)
    assert load(path, columns=["answer"]).to_list() == [{"prompt": "p", "answer": "a"}]


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_each_reserved_name_is_refused(jsonl, name):
    with pytest.raises(DataError, match=f"column '{name}' has a name"):
        load(jsonl({"prompt": "p", name: 1}))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((ROWS[0], "{'prompt': 1}"), r"train.jsonl, line 2: no valid JSON"),
        ((ROWS[0], "", "[1]"), r"train.jsonl, line 3: a list where a JSON object is due"),
        (("",), r"train.jsonl: the data set is empty"),
        ((ROWS[0], "", {"answer": "1"}), r"train.jsonl, line 3: 'prompt' is missing or null"),
        ((ROWS[0], {"prompt": None}), r"train.jsonl, line 2: 'prompt' is missing or null"),
        ((ROWS[0], {"prompt": " "}), r"train.jsonl, line 2: the prompt is blank"),
        (({"prompt": 1},), r"train.jsonl, line 1: 'prompt' is a int; a prompt is a text or a list"),
        (
            ({"promt": "a"},),
            r"no column 'prompt'; did you mean 'promt'\? It has: promt \(data.prompt_column names",
        ),
        ((ROWS[0], ROWS[1], {"prompt": "p", "answer": 3}), r"train.jsonl, line 3, key 'answer': "),
        (({"prompt": "p", "x": 1}, {"prompt": "p", "x": {"y": 1}}), r"train.jsonl, line 2, key 'x': "),
        (({"prompt": "p", "x": 2**63}, {"prompt": "p", "x": -1}), r"train.jsonl, line \d, key 'x': "),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_line_and_key(jsonl, lines, message):
    with pytest.raises(DataError, match=message):
        load(jsonl(*lines))


def test_a_missing_template_column_is_named(jsonl):
    with pytest.raises(DataError, match=r"no column 'answr'; did you mean 'answer'\?"):
        load(jsonl(*ROWS), template="{answr}")
    with pytest.raises(DataError, match="no column 'levels'; did you mean 'level'"):
        load(jsonl(*ROWS), columns=["levels"])
    with pytest.raises(DataError, match=r"line 2: 'hint' is missing or null"):
        load(jsonl({"prompt": "p", "hint": "h"}, {"prompt": "p"}), template="{prompt} {hint}")
    with pytest.raises(DataError, match="column 'prompt' would be replaced by 'answer'"):
        load(jsonl(*ROWS), prompt_column="answer")


def test_a_row_without_an_answer_is_found_before_a_step_draws_it(jsonl):
    rows = load(jsonl(ROWS[0], ROWS[1], {"prompt": "p"}))
    has_answers(rows.select(range(2)), [("answer", "the reward exact")])
    with pytest.raises(
        DataError, match=r"^data: 'answer', which the reward exact needs, is .* null in 1 of 3 .* row 3"
    ):
        has_answers(rows, [("answer", "the reward exact")], "data: ")
    with pytest.raises(DataError, match="has no column 'gold', which the reward math needs; it has: prompt, answer"):
        has_answers(rows, [("gold", "the reward math")])


def test_what_is_not_there_is_named(tmp_path, jsonl):
    for source in ("no/such.jsonl", "./no_such", "no.parquet"):
        with pytest.raises(DataError, match=f"{source}: no such file or folder"):
            load(source)
    (tmp_path / "bad.parquet").write_bytes(b"PAR")
    with pytest.raises(DataError, match=r"bad.parquet: no readable parquet file"):
        load(str(tmp_path / "bad.parquet"))
    for ending, kind in (("csv", "csv"), ("tsv", "csv"), ("json", "json"), ("txt", "text")):
        with pytest.raises(DataError, match=rf"rows.{ending}: .* ends in .jsonl or .parquet; to make one: .*'{kind}'"):
            load(jsonl("a", name=f"rows.{ending}"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: the folder cannot be read as a data set"):
        load(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="nothing serves 'tiny:'; known: none"):
        load("tiny:chain_sum")


def test_a_hub_name_without_a_network_is_a_clear_error(monkeypatch):
    for place in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="openai/gsm8k-is-not-here: there is no such file or folder here, and the hub"):
        load("openai/gsm8k-is-not-here", subset="main")


def test_an_embedded_source_is_asked_of_its_builder():
    def build(config, seed):
        return datasets.Dataset.from_list([{"prompt": config.source, "answer": str(seed)}])

    assert load("tiny:sums", {"tiny": build}, seed=7).to_list() == [{"prompt": "tiny:sums", "answer": "7"}]


def test_a_reasoning_gym_task_brings_its_verifier():
    source = {"task": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}, "size": 3}
    rows = load(source, seed=5, template="{prompt} Answer in tags.")
    assert rows.column_names == ["prompt", "answer", "reasoning_gym"]
    assert rows["prompt"][0].endswith(" Answer in tags.")
    assert rows.to_list() == load({**source, "seed": 5}, seed=1, template="{prompt} Answer in tags.").to_list()
    assert rows["prompt"][:] != load(source, seed=6)["prompt"][:]
    reward = ReasoningGymConfig(workers=1).build()
    completions = [f"<answer>{answer}</answer>" for answer in rows["answer"]]
    columns = {name: rows[name][:] for name in ("answer", "reasoning_gym")}
    assert reward(rows["prompt"][:], completions, [[1]] * 3, **columns) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"task": "chain_sums"}, "has no task 'chain_sums'; near: chain_sum"),
        ({"task": "chain_sum", "params": {"min_term": 2}}, "does not take the params {'min_term': 2}: TypeError: "),
        (
            {"task": "chain_sum", "params": {"min_terms": 0}},
            "does not take the params {'min_terms': 0}: AssertionError",
        ),
        ({"task": "chain_sum", "params": {"seed": 0}}, "set seed beside params, not in it"),
    ],
)
def test_a_reasoning_gym_task_that_is_not_there_is_named(source, message):
    with pytest.raises(DataError, match=message):
        load(source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "\\boxed{}"}, "write braces that stand for themselves twice"),
        ({"template": "a {0}"}, "is no column name"),
        ({"template": "a {b"}, "has unpaired braces"),
        ({"system": "x"}, "system needs chat: true"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"promt_column": "x"}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"source": "a.jsonl", **settings})


def test_prompt_lengths_are_those_the_trainer_will_see(jsonl, tokenizer):
    rows = load(jsonl({"prompt": "What is it ?"}, {"prompt": "is it"}))
    assert check_prompt_lengths(rows, tokenizer, 5) == 5
    with pytest.raises(DataError, match=r"prompt 0 has 5 tokens and the limit is 4; .* It begins: 'What is it \?'"):
        check_prompt_lengths(rows, tokenizer, 4)
    chat = load(jsonl({"prompt": "What is it ?"}), chat=True)
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        check_prompt_lengths(chat, tokenizer, 9)
    tokenizer.chat_template = (
        "<s>{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}{% if deep %} is it{% endif %}"
    )
    assert check_prompt_lengths(chat, tokenizer, 9) == 7  # <s> user What is it ? assistant
    assert check_prompt_lengths(chat, tokenizer, 9, chat_template_kwargs={"deep": True}) == 9


def test_a_second_bos_is_refused(jsonl, tokenizer):
    rows = load(jsonl({"prompt": "is it"}, {"prompt": "<s> is it"}))
    with pytest.raises(DataError, match="prompt 1 starts with two BOS tokens"):
        check_prompt_lengths(rows, tokenizer, 9)
    tokenizer.chat_template = "<s> <s>{% for m in messages %} {{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="prompt 0 starts with two BOS tokens"):
        check_prompt_lengths(load(jsonl({"prompt": "is it"}), chat=True), tokenizer, 9)


def test_every_setting_is_described():
    schema = DataConfig.model_json_schema()
    for model in (schema, schema["$defs"]["GymSource"]):
        assert all(field.get("description") for field in model["properties"].values())
