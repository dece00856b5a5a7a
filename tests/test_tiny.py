"""The embedded default: its problems, its tokenizer, how its models are made and kept, and how good they are."""

import json
import math
import random
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid import tiny
from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.tiny import RECIPES, ensure_tiny, tiny_tokenizer
from hybrid.tiny_tasks import (
    ANSWER_PATTERN,
    TASKS,
    Problem,
    degraded_prompt,
    render_working,
    split_of,
    tiny_dataset,
)

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def hasty(monkeypatch, tmp_path):
    """Recipes that are content after ten batches of four, in a cache of their own."""
    quick = {key: replace(recipe, target=0.0, batch_size=4) for key, recipe in RECIPES.items()}
    monkeypatch.setattr(tiny, "RECIPES", quick)
    monkeypatch.setattr(tiny, "VALIDATION_ROWS", 8)
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_problem_and_its_working():
    problem = Problem((3, 5, 9, 4))
    assert problem.prompt == "3+5+9+4="
    assert problem.totals() == [8, 17, 21]
    assert render_working(problem.totals()) == "8,17,21#21"
    assert problem.answer == "21"
    assert degraded_prompt(problem, 0) == "?+5+9+4="
    assert degraded_prompt(problem, 3) == "3+5+9+?="


def test_a_teacher_forgets_the_carry_of_a_nine_and_of_nothing_else():
    assert Problem((8, 9, 5)).totals(drop_carry=True) == [7, 12]  # 8+9 is 7 to it, and 7+5 is right again
    assert Problem((8, 9, 5)).kind == "nine_carried"
    assert Problem((4, 6, 9)).totals(drop_carry=True) == [10, 19]  # nothing to carry in 10+9
    assert Problem((9, 8, 7)).totals(drop_carry=True) == [17, 24]  # the nine is not added, it is added to
    assert Problem((9, 8, 7)).kind == "ordinary"


def test_a_slip_counts_one_too_many():
    # at 5/3 the chance of a slip is at least 5/3 * 0.6 = 1 for every digit
    slipped = Problem((3, 5, 9, 4)).totals(slip=5 / 3, rng=random.Random(0))
    assert slipped == [9, 19, 24]  # 3+5+1, 9+9+1, 19+4+1
    assert Problem((3, 5, 9, 4)).totals(slip=0.0, rng=random.Random(0)) == [8, 17, 21]


def test_larger_numbers_slip_more_often():
    rng, share = random.Random(1), {}
    for digit in (1, 9):
        share[digit] = sum(Problem((1, digit)).totals(slip=0.5, rng=rng) == [2 + digit] for _ in range(4000)) / 4000
    assert share[1] == pytest.approx(0.5 * 0.6, abs=0.03)  # three standard errors are 0.023
    assert share[9] == pytest.approx(0.5 * 1.4, abs=0.03)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_the_verifiers_pattern_reads_the_answer_off_any_working(terms):
    problem = Problem(tuple(terms))
    for totals in (problem.totals(), problem.totals(drop_carry=True)):
        found = re.search(ANSWER_PATTERN, render_working(totals))
        assert found is not None
        assert int(found[1]) == totals[-1]
    assert problem.answer == str(sum(terms))
    if problem.kind == "nine_carried":
        assert problem.totals(drop_carry=True)[-1] != sum(terms)


@pytest.mark.parametrize("task", TASKS)
def test_a_data_set_is_what_it_says_and_its_splits_are_apart(task):
    rows = tiny_dataset(task, "train", 200, 5)
    assert rows.column_names == ["prompt", "answer", "reference", "degraded", "kind"]
    for row in rows:
        assert eval(row["prompt"].removesuffix("=")) == int(row["answer"])
        assert row["reference"].endswith(f"#{row['answer']}")
        assert len(row["reference"]) + 1 <= 24  # the longest right working with its end fits
        assert re.fullmatch(re.escape(row["degraded"]).replace(r"\?", r"\d"), row["prompt"])
        assert row["degraded"].count("?") == 1
    assert len(set(rows["prompt"])) == 200
    assert rows["prompt"][:] == tiny_dataset(task, "train", 200, 5)["prompt"][:]
    assert rows["prompt"][:] != tiny_dataset(task, "train", 200, 6)["prompt"][:]
    seen = {split: set(tiny_dataset(task, split, 300, 7)["prompt"]) for split in ("train", "validation", "eval")}
    assert not seen["train"] & seen["eval"]
    assert not seen["validation"] & (seen["train"] | seen["eval"])


def test_an_eval_problem_is_never_taught():
    recipe, rng = RECIPES["chain_sum", "student"], random.Random(0)
    prompts = [tiny.training_text(recipe, "train", rng)[0] for _ in range(400)]
    plain = [prompt.split("|")[-1] for prompt in prompts if "?" not in prompt]
    assert len(plain) > 300
    assert {split_of(prompt) for prompt in plain} == {"train"}


def test_a_hint_is_the_end_of_the_working_below_it():
    recipe, rng = RECIPES["chain_sum", "student"], random.Random(0)
    texts = [tiny.training_text(recipe, "train", rng) for _ in range(1000)]
    hinted = [(prompt.split("|"), completion) for prompt, completion in texts if "|" in prompt]
    assert len(hinted) == pytest.approx(1000 * recipe.context_share / 2, abs=30)  # three standard errors are 28
    assert all(completion.endswith(f"#{hint}") for (hint, _), completion in hinted)
    right = [eval(problem.removesuffix("=")) == int(hint) for (hint, problem), _ in hinted]
    assert 0.4 < sum(right) / len(right) < 0.8  # half of them by design, and some slips that did not come


def test_what_does_not_exist_is_named():
    with pytest.raises(
        ConfigError, match="no tiny task is called 'chain_sums'; there are chain_sum, carry_sum, long_sum"
    ):
        tiny_dataset("chain_sums", "train", 1, 0)
    with pytest.raises(ConfigError, match="there are train, validation and eval"):
        tiny_dataset("chain_sum", "test", 1, 0)
    with pytest.raises(ConfigError, match="there are student and teacher"):
        ensure_tiny("chain_sum", "examiner")
    with pytest.raises(DataError, match="at least 1; got 0"):
        tiny_dataset("chain_sum", "train", 0, 0)
    with pytest.raises(DataError, match="677 distinct problems were asked for and only 676"):
        tiny_dataset("chain_sum", "validation", 677, 0)  # about a tenth of the 6561


@given(st.text())
def test_any_composed_text_is_written_and_read_back(text):
    composed = unicodedata.normalize("NFC", text)
    ids = TOKENIZER(composed)["input_ids"]
    assert len(ids) == len(composed.encode())
    assert TOKENIZER.decode(ids) == composed


def test_the_tokenizer_pads_on_the_left_and_knows_its_marks():
    tokenizer = tiny_tokenizer()
    batch = tokenizer(["1+2=", "3="], padding=True)
    assert batch["attention_mask"] == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert batch["input_ids"][1][:2] == [tokenizer.pad_token_id] * 2
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 256 + 3


def test_a_chat_is_its_contents_and_a_system_message_is_a_hint():
    user, answer = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3#3"}
    template = tiny_tokenizer().apply_chat_template
    assert template([user], tokenize=False, add_generation_prompt=True) == "1+2="
    assert template([{"role": "system", "content": "3"}, user], tokenize=False) == "3|1+2="
    assert template([user, answer], tokenize=False) == "1+2=3#3<|eos|>"


def test_rows_teach_the_completion_and_its_end_alone():
    eos = TOKENIZER.eos_token_id
    ids_BT, labels_BT = tiny.encode_rows(TOKENIZER, [("1+2=", "3#3"), ("1=", "1")])
    assert ids_BT.shape == labels_BT.shape == (2, 8)
    assert TOKENIZER.decode(ids_BT[0]) == "1+2=3#3<|eos|>"
    assert labels_BT[0].tolist() == [-100] * 4 + TOKENIZER("3#3")["input_ids"] + [eos]
    assert labels_BT[1].tolist() == [-100] * 2 + TOKENIZER("1")["input_ids"] + [eos] + [-100] * 4


def test_the_probability_of_a_working_against_loops():
    torch.manual_seed(0)
    model = tiny.Qwen2ForCausalLM(tiny._architecture(RECIPES["chain_sum", "student"])).eval()
    rows = [("1+2=", "3#3"), ("4+5+6=", "9,15#15")]
    slow = []
    for prompt, completion in rows:
        ids = [*TOKENIZER(prompt + completion)["input_ids"], TOKENIZER.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        slow.append(math.exp(sum(logprobs[t - 1, ids[t]].item() for t in range(len(prompt), len(ids)))))
    assert tiny.working_probability(model, *tiny.encode_rows(TOKENIZER, rows)) == pytest.approx(sum(slow) / 2, rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_model_is_made_once_and_read_by_the_ordinary_classes(hasty, task, role):
    told = []
    folder = ensure_tiny(task, role, progress=lambda *what: told.append(what))
    assert folder.parent == hasty
    assert told == [(f"tiny {role} for {task}", done, 1500) for done in (10, 1500)]
    assert ensure_tiny(task, role, progress=lambda *what: told.append(what)) == folder
    assert len(told) == 2
    facts = json.loads((folder / "tiny.json").read_text())
    assert (facts["steps"], facts["recipe"]["task"], facts["recipe"]["role"]) == (10, task, role)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for text in ("12|3+?+9= é\n", "e\u0301", "  it's 4.5%", "<|eos|>", "<|endoftext|>"):
        assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}


def test_the_same_recipe_makes_the_same_weights_and_leaves_the_callers_random_numbers_alone(hasty, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    folders = [ensure_tiny("chain_sum", "student", cache_dir=tmp_path / name) for name in ("a", "b")]
    assert torch.equal(torch.rand(2), expected)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    assert folders[0].name == folders[1].name


def test_another_recipe_or_other_texts_have_another_folder():
    recipes = [*RECIPES.values(), replace(RECIPES["chain_sum", "student"], seed=1)]
    assert len({tiny.content_key(recipe) for recipe in recipes}) == len(recipes)


def test_an_unfinished_folder_is_made_again(hasty):
    folder = ensure_tiny("chain_sum", "student")
    (folder / "tiny.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert ensure_tiny("chain_sum", "student") == folder
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert not list(hasty.glob("*.partial-*"))


def test_a_build_that_is_cut_off_leaves_nothing_that_looks_finished(hasty):
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_tiny("chain_sum", "student", progress=interrupt)
    assert not [path for path in hasty.iterdir() if path.suffix != ".lock"]
    assert ensure_tiny("chain_sum", "student").is_dir()


def test_a_target_that_is_not_reached_is_an_error(hasty, monkeypatch):
    recipe = replace(RECIPES["chain_sum", "student"], target=1.1, max_steps=10, batch_size=4)
    monkeypatch.setattr(tiny, "RECIPES", {("chain_sum", "student"): recipe})
    with pytest.raises(HybridError, match=r"reached 0\.\d+ of its target 1\.1 in 10 steps"):
        ensure_tiny("chain_sum", "student")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.* cannot be written .*; set HYBRID_CACHE"):
        ensure_tiny("chain_sum", "student", cache_dir=tmp_path / "file")


ASKING = """
import sys
import unicodedata
from dataclasses import replace
from hybrid import tiny
recipe = replace(tiny.RECIPES["chain_sum", "student"], target=0.0, batch_size=4)
tiny.RECIPES = {("chain_sum", "student"): recipe}
told = []
folder = tiny.ensure_tiny("chain_sum", "student", progress=lambda *what: told.append(what), cache_dir=sys.argv[1])
print(sum(done > 0 for _, done, _ in told), folder)
"""


@pytest.mark.processes
def test_two_processes_that_ask_at_once_build_once(tmp_path):
    asked = [
        subprocess.Popen([sys.executable, "-c", ASKING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=1500)[0].splitlines()[-1].split() for process in asked]
    assert [process.returncode for process in asked] == [0, 0]
    assert sorted(steps for steps, _ in said) == ["0", "2"]  # one made it, in 10 of 1500 steps; one found it
    assert said[0][1] == said[1][1]


def accuracy(folder, *, prompts: int, samples: int) -> float:
    """The share of right answers among answers sampled at temperature 1 on held-out problems."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = tiny_dataset("chain_sum", "eval", prompts, 0)
    asked = tokenizer([prompt for prompt in rows["prompt"] for _ in range(samples)], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    said = model.generate(**asked, max_new_tokens=24, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer for answer in rows["answer"] for _ in range(samples)]
    right = [text.endswith(f"#{answer}") for text, answer in zip(texts, answers, strict=True)]
    return sum(right) / len(right)


def test_the_student_is_weak_and_the_teacher_better_but_not_perfect(tiny_cache):
    student, teacher = (ensure_tiny("chain_sum", role, cache_dir=tiny_cache) for role in ("student", "teacher"))
    assert 0.08 < accuracy(student, prompts=128, samples=4) < 0.30
    assert 0.70 < accuracy(teacher, prompts=128, samples=4) < 0.92
