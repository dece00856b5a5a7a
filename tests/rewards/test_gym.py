import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import create_dataset

from hybrid.errors import RewardError
from hybrid.rewards import ReasoningGymConfig, gym_record
from hybrid.rewards.worker import packed, unpacked


@pytest.fixture(scope="module")
def reward():
    return ReasoningGymConfig(workers=1, limit_s=20.0).build()


def record(task, **params):
    entry = create_dataset(task, seed=3, size=1, **params)[0]
    return entry, gym_record(task, {"seed": 3, "size": 1, **params}, entry)


def judge(reward, text, problem, **columns):
    return reward(prompts=["p"], completions=[text], completion_ids=[[1]], reasoning_gym=[problem], **columns)[0]


def tagged(answer):
    return f"<think>hm</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("task", "params"), [("chain_sum", {"min_terms": 2, "max_terms": 3}), ("spell_backward", {}), ("leg_counting", {})]
)
def test_the_tasks_own_verifier_accepts_its_reference(reward, task, params):
    entry, problem = record(task, **params)
    assert judge(reward, tagged(entry["answer"]), problem) == 1.0
    assert judge(reward, tagged("certainly not"), problem) != 1.0


def test_tuples_reach_the_verifier_as_tuples(reward):
    # rearc compares the parsed grid with a tuple of tuples; JSON's lists would earn 0.05
    entry = {"answer": "1 2\n3 4", "metadata": {"output": ((1, 2), (3, 4))}}
    assert judge(reward, tagged("1 2\n3 4"), gym_record("rearc", {}, entry)) == 1.0


def test_the_score_is_the_librarys_own(reward):
    entry, problem = record("chain_sum")
    answer = entry["answer"] + "000"
    expected = create_dataset("chain_sum", seed=3, size=1).score_answer(answer, entry)
    assert 0.0 < expected < 1.0
    assert judge(reward, tagged(answer), problem) == expected
    assert judge(ReasoningGymConfig(success_at=1.0, workers=1).build(), tagged(answer), problem) == 0.0


def test_the_answer_is_found_where_the_setting_says(reward):
    entry, problem = record("chain_sum")
    answer = entry["answer"]
    box, line = (ReasoningGymConfig(answer_in=place, workers=1).build() for place in ("box", "last_line"))
    assert judge(box, rf"\boxed{{{answer}}}", problem) == 1.0
    assert judge(line, f"so\n{answer}\n", problem) == 1.0
    assert judge(reward, answer, problem) == 0.0
    assert judge(reward, f"<think><answer>{answer}</answer>", problem) == 0.0
    assert reward.judged_answer(tagged(" 7 ")) == "7"
    assert reward.judged_answer("7") is None


def test_an_answer_on_which_the_verifier_raises_is_wrong_and_counted(reward, caplog):
    _, problem = record("prime_factorization")
    metrics = {}
    assert judge(reward, tagged("(("), problem, log_metric=metrics.__setitem__) == 0.0
    assert metrics == {"reasoning_gym/beyond_limit": 0.0, "reasoning_gym/unreadable": 1.0}
    assert "raised on the answer '((' (ValueError: " in caplog.text


def test_a_verifier_that_raises_on_its_own_reference_is_an_error(reward):
    problem = json.dumps({"task": "prime_factorization", "params": {}, "entry": {"answer": "no number"}})
    with pytest.raises(
        RewardError, match=r"reward 'reasoning_gym': raised RuntimeError: the verifier raised ValueError.*; on row 0"
    ):
        judge(reward, tagged("3"), problem)


def test_a_hang_is_killed():
    _, problem = record("countdown")
    hasty = ReasoningGymConfig(limit_s=2.0, workers=1).build()
    assert judge(hasty, tagged("9**9**9**9"), problem) == 0.0
    assert judge(hasty, tagged("1"), problem) != 1.0


def test_a_row_without_a_record_is_an_error(reward):
    with pytest.raises(RewardError, match="column 'reasoning_gym' holds None where a reasoning-gym record is due"):
        judge(reward, tagged("1"), None)
    with pytest.raises(RewardError, match="needs the column 'reasoning_gym'"):
        reward(prompts=["p"], completions=["a"], completion_ids=[[1]])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.integers())


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=8
    )
)
def test_an_entry_survives_json(value):
    assert unpacked(json.loads(json.dumps(packed(value)))) == value


def test_what_json_cannot_carry_is_refused():
    with pytest.raises(TypeError, match="cannot keep a set as JSON"):
        packed({"a": {1}})
