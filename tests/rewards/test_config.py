import pytest
from pydantic import TypeAdapter, ValidationError

from hybrid.errors import ConfigError, RewardError
from hybrid.rewards import RewardConfig, build_rewards

ADAPTER = TypeAdapter(RewardConfig)


def build(**settings):
    return ADAPTER.validate_python(settings).build()


def score(reward, *completions, **columns):
    return reward(["p"] * len(completions), list(completions), [[1]] * len(completions), **columns)


def test_exact_takes_the_last_match_after_the_thinking():
    reward = build(name="exact")
    assert score(reward, "<answer>1</answer><answer> 2\n</answer>", answer=["2"]) == [1.0]
    assert score(reward, "<answer>2</answer><answer>1</answer>", answer=[2]) == [0.0]
    assert score(reward, "<think><answer>2</answer>", answer=["2"]) == [0.0]
    assert reward.judged_answer is not None
    assert reward.judged_answer("<answer> 2 </answer>") == "2"
    assert reward.judged_answer("2") is None
    hashes = build(name="exact", pattern=r"####\s*(.+)", answer_column="gold")
    assert score(hashes, "so\n#### 18", "#### 17\nwell", gold=["18", "18"]) == [1.0, 0.0]


def test_format_matches_all_or_some():
    full = build(name="format", pattern=r"(?s)<think>.*</think>.+")
    assert score(full, "<think>\n</think>\n1", "x<think></think>1", "<think>") == [1.0, 0.0, 0.0]
    some = build(name="format", pattern=r"\\boxed\{", match="search")
    assert score(some, r"a \boxed{1}", "a") == [1.0, 0.0]
    assert some.judged_answer is None


def test_a_function_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def even(completions, bonus, **_):\n"
        "    return [bonus[i] if len(text) % 2 == 0 else None for i, text in enumerate(completions)]\n"
        "even.judged_answer = str.strip\n"
    )
    reward = build(name="python", path=f"{file}:even", weight=0.5)
    assert (reward.__name__, reward.weight) == ("even", 0.5)
    assert score(reward, "ab", "abc", bonus=[3, 3]) == [3.0, None]
    assert reward.judged_answer == str.strip
    with pytest.raises(RewardError, match=r"reward 'even': raised TypeError: .*'bonus'"):
        score(reward, "ab")


def test_a_function_from_a_module():
    assert build(name="python", path="statistics:fmean").__name__ == "fmean"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "mine.py:even", "has no function 'even'"),
        ("even = 1", "mine.py:even", "has no function 'even'"),
        ("import no_such_thing", "mine.py:even", "cannot be imported: ModuleNotFoundError"),
        ("def", "mine.py:even", "cannot be imported: SyntaxError"),
        ("1 / 0", "mine.py:even", "cannot be imported: ZeroDivisionError"),
        ("", "other.py:even", "other.py' does not exist"),
        ("", "no.such.module:even", "reward module 'no.such.module' cannot be imported"),
    ],
)
def test_a_function_that_is_not_there_is_named(tmp_path, monkeypatch, text, place, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        build(name="python", path=place)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"name": "maths"}, "union_tag_invalid"),
        ({"name": "math", "answer_colum": "a"}, "extra_forbidden"),
        ({"name": "math", "limit_s": 0}, "greater_than"),
        ({"name": "math", "weight": "nan"}, "finite_number"),
        ({"name": "exact", "pattern": "a"}, "value_error"),
        ({"name": "exact", "pattern": "(a)(b)"}, "value_error"),
        ({"name": "format", "pattern": "(a"}, "value_error"),
        ({"name": "format"}, "missing"),
        ({"name": "python", "path": "mine.py"}, "string_pattern_mismatch"),
        ({"name": "reasoning_gym", "answer_in": "box", "success_at": 2}, "less_than_equal"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, place):
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(settings)
    assert caught.value.errors()[0]["type"] == place


def test_several_rewards_have_names_of_their_own():
    configs = [
        ADAPTER.validate_python({"name": name, "weight": w}) for name, w in [("exact", 1), ("math", 2), ("exact", 3)]
    ]
    rewards = build_rewards(configs)
    assert [reward.__name__ for reward in rewards] == ["exact", "math", "exact_2"]
    assert [reward.weight for reward in rewards] == [1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="name at least one"):
        build_rewards([])


def test_every_setting_is_described():
    for kind, schema in ADAPTER.json_schema()["$defs"].items():
        for key, field in schema["properties"].items():
            assert key == "name" or field.get("description"), f"{kind}.{key}"
