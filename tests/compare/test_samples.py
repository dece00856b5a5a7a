import json

import pytest

from hybrid.compare.samples import answers_side_by_side, read_answers
from hybrid.errors import DataError


def test_the_latest_right_and_wrong_answer_of_every_method(runs):
    found = answers_side_by_side(runs)
    assert [(a.prompt, a.method, a.reward, a.step, a.seed) for a in found if a.task == "sums"] == [
        (prompt, method, reward, 90, 0)
        for prompt in ("What is 12+30?", "What is 5+6?")
        for method in ("grpo", "opd", "opdvr")
        for reward in (1.0, 0.0)
    ]
    assert all(len(a.tokens) == len(a.advantages) == len(a.kept) == len(a.kl_weights) for a in found)
    assert found[0].kept[0] is False


def test_prompts_that_more_methods_answered_come_first_and_late_ones_before_early_ones(runs, recorded):
    def add(run, *rows):
        more = run.artifacts / "rollouts" / "rollouts-2.jsonl"
        more.write_text("".join(json.dumps(row) + "\n" for row in rows))

    late = [recorded("any", "7+7", reward, 95) for reward in (0.0, 1.0)]
    of_seed_0 = [run for run in runs if run.seed == 0 and run.task == "sums"]
    add(of_seed_0[0], recorded("any", "1+1", 1.0, 99), *late)
    for run in of_seed_0[1:]:
        add(run, *late)
    prompts = list(dict.fromkeys(answer.prompt for answer in answers_side_by_side(runs) if answer.task == "sums"))
    assert prompts == ["What is 7+7?", "What is 12+30?", "What is 5+6?", "What is 1+1?"]
    assert {answer.prompt for answer in answers_side_by_side(runs, num_prompts=1)} == {"What is 7+7?"}


def test_the_seed_that_most_methods_have_is_read(runs):
    (runs[0].artifacts / "rollouts" / "rollouts.jsonl").unlink()
    assert {answer.seed for answer in answers_side_by_side(runs)} == {1}


def test_of_a_very_long_file_the_end_is_read(recorded, tmp_path, made_run, monkeypatch):
    monkeypatch.setattr("hybrid.compare.samples._MOST_BYTES", 1500)
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(recorded("any", "1+1", 1.0, step)) + "\n" for step in range(1000)))
    steps = [answer.step for answer in read_answers(file, made_run("opd", 0))]
    assert steps == list(range(steps[0], 1000))
    assert 1 < len(steps) < 8


@pytest.fixture
def read(tmp_path, made_run):
    def read_text(text):
        file = tmp_path / "rollouts.jsonl"
        file.write_text(text)
        return list(read_answers(file, made_run("opd", 0)))

    return read_text


def test_the_least_that_a_record_needs(read):
    (answer,) = read(
        '{"prompt_id": 7, "token_ids": [5, 9], "advantages": [0.0, -1.0]}\n{"prompt_id": 8, "token_ids": [5]}\n'
    )
    assert answer.tokens == ["[5]", "[9]"]
    assert answer.kept == [False, True]
    assert answer.kl_weights == []
    assert answer.reward is None
    assert answer.prompt == "prompt 7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rollouts\.jsonl, line 1: .*Invalid JSON"),
        ('{"prompt_id": "p"}', r"rollouts\.jsonl, line 1: token_ids: Field required"),
        ('{"prompt_id": "p", "token_ids": [1, 2], "advantages": [1.0]}', "differ in length: 2 tokens, 1 advantages"),
    ],
)
def test_a_malformed_record_is_named(read, line, message):
    with pytest.raises(DataError, match=message):
        read(line)


def test_runs_without_records_have_no_answers(made_run):
    assert answers_side_by_side([made_run("opd", 0)]) == []
