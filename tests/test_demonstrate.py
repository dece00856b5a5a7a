"""The teacher answers beforehand: its accuracy on each prompt and its shortest right answer, for RSTG and SFT."""

import re

import numpy as np
import orjson
import pytest
from datasets import Dataset

from hybrid.demonstrate import demonstrate, rows_of
from hybrid.errors import ConfigError
from hybrid.evaluate import Evaluation, Sampling
from hybrid.read_config import read_experiment
from tests.experiments import QUICKSTART, as_options, small

pytestmark = pytest.mark.xdist_group("experiments")


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_cache):
    """The file for twelve problems of the quickstart, and what the call returned."""
    folder = tmp_path_factory.mktemp("demonstrations")
    config = read_experiment(QUICKSTART, small(folder))
    found = demonstrate(config, folder / "deep" / "chain_sum.jsonl", samples=4)
    return folder / "deep" / "chain_sum.jsonl", found, config


def rows_in(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_the_shortest_right_answer_is_taken_and_none_where_none_is_right():
    prompts = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    found = Evaluation(
        reward_PK=np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        right_PK=np.array([[True, False, True], [False, False, False]]),
        length_PK=np.array([[9, 2, 5], [1, 1, 1]]),
        truncated_PK=np.zeros((2, 3), dtype=bool),
        texts=[["long", "wrong", "short"], ["x", "y", "z"]],
        sampling=Sampling(samples=3),
    )
    assert list(rows_of(prompts, found)) == [
        {"prompt": "a", "answer": "1", "teacher_accuracy": 2 / 3, "demonstration": "short"},
        {"prompt": "b", "answer": "2", "teacher_accuracy": 0.0, "demonstration": None},
    ]


def test_every_prompt_is_written_with_a_right_demonstration_or_none(written):
    path, found, config = written
    rows = rows_in(path)
    assert len({row["prompt"] for row in rows}) == 12
    pattern = config.rewards[0].pattern
    for row in rows:
        assert {"prompt", "answer", "reference", "degraded", "kind"} <= set(row)
        assert row["teacher_accuracy"] in {0.0, 0.25, 0.5, 0.75, 1.0}
        assert (row["demonstration"] is None) == (row["teacher_accuracy"] == 0)
        if row["demonstration"] is not None:
            assert re.search(pattern, row["demonstration"]).group(1) == row["answer"]
    assert found["teacher_accuracy"] == pytest.approx(np.mean([row["teacher_accuracy"] for row in rows]))
    assert found["with_demonstration"] == pytest.approx(np.mean([row["demonstration"] is not None for row in rows]))
    assert found["teacher_accuracy"] > 0.5


def test_the_command_writes_the_same_file_again_and_leaves_nothing_else(written, tmp_path, run_hybrid):
    path, _, _ = written
    out = tmp_path / "again.jsonl"
    options = as_options(small(tmp_path / "runs"))
    code, told, _ = run_hybrid("teacher", "demonstrate", QUICKSTART, out, "--samples", "4", *options)
    assert code == 0
    assert "teacher right in" in told
    assert out.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("method", ["{name: rstg, beta_init: 0.5}", "{name: sft}"])
def test_a_training_reads_it(written, tmp_path, run_hybrid, method):
    path, _, _ = written
    changes = ["train.steps=1", "compare=[]", f"data.source={path}", "data.limit=null", "evaluate=null"]
    options = as_options([*small(tmp_path), *changes, f"method={method}"])
    code, _, complaint = run_hybrid("train", QUICKSTART, *options)
    assert code == 0, complaint
    (records,) = tmp_path.glob("quickstart/*/*/rollouts.jsonl")
    known = {row["prompt"]: row for row in rows_in(path)}
    for line in rows_in(records):
        if "rstg" in method:
            assert line["teacher_accuracy"] == known[line["prompt"]]["teacher_accuracy"]
        assert bool(line["demonstration"]["token_ids"]) == (known[line["prompt"]]["demonstration"] is not None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["teacher=null", "method.name=grpo", "compare=[]"], "demonstrations need a teacher"),
        (["teacher={self: {sync: snapshot}}", "method.name=grpo", "compare=[]"], "demonstrations need a model"),
    ],
)
def test_only_a_model_can_demonstrate(tmp_path, changes, complaint):
    config = read_experiment(QUICKSTART, small(tmp_path, *changes))
    with pytest.raises(ConfigError, match=complaint):
        demonstrate(config, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
