import pytest
from rich.console import Console

from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.explain_command import method_from, run_explain
from tests.explaining import FULL, advantages, ask, explained, scored, written_to


@pytest.fixture
def file_of(tmp_path):
    return lambda *lines: written_to(tmp_path / "rollouts.jsonl", *lines)


# Settings.


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("opdvrr", [], "--method opdvrr: method.name: there is no 'opdvrr'; did you mean opdvr?"),
        ("kat", ["windw=3"], "--set windw=3: method.kat.windw: unknown key; did you mean window?"),
        ("kat", ["window=wide"], '--set window=wide: method.kat.window: should be a whole number; got "wide"'),
        ("kat", ["window"], "--set window: write --set key.key=value"),
        ("kdrl", ["beta.ende=1"], "--set beta.ende=1: method.kdrl.beta.ende: unknown key; did you mean end?"),
        ("opd", ["use=loss"], "k1 as a differentiable loss has an expected gradient of zero"),
        ("opd", ["estimator=reverse_kl", "use=reward"], "as an advantage its expected gradient is zero"),
        ("mix", ["parts=[{weight: 1, method: {name: grpo2}}]"], "there is no 'grpo2'; did you mean grpo?"),
        ("mix", [], "--method mix: method.mix.parts: is missing"),
    ],
)
def test_a_wrong_setting_is_told_with_the_nearest_right_one(file_of, method, settings, message):
    with pytest.raises(ConfigError) as caught:
        ask(file_of(scored(1)), method, *settings)
    assert message in str(caught.value)


def test_a_number_may_be_written_with_an_exponent():
    assert method_from("grpo", ["eps=1e-6"]).model_dump()["eps"] == 1e-6
    kdrl = method_from("kdrl", ["beta.end=1e-6", "beta.steps=100"]).model_dump()
    assert kdrl["beta"] == {"start": 5e-3, "end": 1e-6, "steps": 100, "shape": "linear"}
    assert method_from("kdrl", ["method.beta.end=1e-6", "method.beta.steps=100"]).model_dump() == kdrl  # as for a run
    assert method_from("kdrl", ["beta=0.5"]).model_dump()["beta"] == 0.5


def test_a_mixture_adds_weighted_credit_and_keeps_its_parts_apart(file_of):
    parts = "parts=[{weight: 1.0, method: {name: grpo, scale: none}}, {weight: 0.5, method: {name: opd}}]"
    one = explained(file_of(scored(1), scored(0)), "mix", parts)
    gap = [0.5, -1, 0, -2.8]
    expected = [[sign * 0.5 + 0.5 * x for x in gap] for sign in (1, -1)]
    assert advantages(one) == [pytest.approx(row) for row in expected]
    own = {"grpo/group_advantage/mean", "grpo/group_advantage/uniform", "opd/gap/mean"}
    assert one["metrics"].keys() == own | {"credit/right", "credit/wrong"}


def test_the_table_says_what_is_not_a_default(file_of):
    parts = (
        "parts=[{method: {name: grpo}}, {weight: {start: 1.0, end: 0.0, steps: 9}, method: {name: opd, ratio_clip: 2}}]"
    )
    for method, settings, words in (
        ("opdvr", [], "default settings"),
        ("opdvr", ["thr=0.5"], "thr: 0.5"),
        ("mix", [parts], "1 grpo() + {start: 1.0, end: 0.0, steps: 9, shape: linear} opd(ratio_clip: 2)"),
    ):
        console = Console(width=200)
        with console.capture() as captured:
            console.print(run_explain(file_of(scored(1)), method, settings, 0, None, False, None, None))
        assert words in captured.get()


def test_a_scheduled_weight_follows_the_step(file_of):
    parts = "parts=[{weight: {start: 1.0, end: 0.0, steps: 10}, method: {name: opd}}]"
    for step, weight in ((0, 1.0), (5, 0.5), (20, 0.0)):
        one = explained(file_of(scored(1)), "mix", parts, step=step)
        assert advantages(one)[0] == pytest.approx([weight * x for x in (0.5, -1, 0, -2.8)])


@pytest.mark.parametrize(
    "text", ["name: opdvr\nthr: 0.25\n", "method: {name: opdvr, thr: 0.25}\nname: an experiment\n"]
)
def test_a_method_may_stand_in_a_file(file_of, tmp_path, text):
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    file = file_of(scored(1), scored(0))
    assert explained(file, str(path))["method"]["thr"] == 0.25
    assert explained(file, str(path), "thr=0.5")["method"]["thr"] == 0.5


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"kl_minimum": [0.1]}', ConfigError, "keeps no 'kl_minimum'; did you mean kl_minima?"),
        ('{"kl_minima": [0.1, "x"]}', DataError, "kl_minima.1: input should be a valid number"),
        ('{"kl_minima": 0.1}', DataError, "kl_minima: input should be a valid list"),
        ('{"kl_minima": [NaN]}', DataError, "kl_minima.0: input should be a finite number"),
        ("[0.1]", DataError, "the whole: input should be a valid dictionary"),
        ("{", DataError, "no JSON"),
    ],
)
def test_a_state_that_is_not_the_methods_is_refused(file_of, tmp_path, text, kind, message):
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(kind) as caught:
        ask(file_of(*FULL), "kat", state=state)
    assert message in str(caught.value)


def test_a_state_file_must_exist(file_of, tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        ask(file_of(*FULL), "kat", state=tmp_path / "none.json")


def test_a_step_is_not_negative(file_of):
    with pytest.raises(ConfigError, match="not negative; got -1"):
        ask(file_of(scored(1)), "grpo", step=-1)


def test_a_result_that_is_no_number_is_an_error(file_of):
    far = scored(1, scores={"teacher": {"logprobs": [-1e305] * 4}}, current_logprobs=[19] * 4)
    with pytest.raises(HybridError, match=r"loss of grpo_opd is inf: a setting or a number of the record is too large"):
        ask(file_of(far), "grpo_opd")
    farther = scored(1, scores={"teacher": {"logprobs": [1.7e308] * 4}}, student_logprobs=[-1.7e308] * 4)
    with pytest.raises(HybridError, match=r"signal 'gap' must be finite where it is known; got inf"):
        ask(file_of(farther), "opd")
