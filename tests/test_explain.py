import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybrid.errors import ConfigError, DataError, HybridError, MissingMeasurement
from hybrid.explain import explain
from hybrid.explain_command import method_from, run_explain
from hybrid.methods import METHODS
from hybrid.records import read_records

BRANCHES = {"rstg": {"all_wrong", "mixed", None}}


def response(prompt: str, rewarded: float | None, length: int, *, seed: int, teacher: bool = True) -> dict:
    """A line with every measurement there is."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float = 1.0) -> list[float]:
        return (scale * torch.rand(length, generator=generator, dtype=torch.float64)).tolist()

    def top() -> list[list[float]]:
        weights = torch.rand(length, 4, generator=generator, dtype=torch.float64) + 0.1
        return (weights / weights.sum(-1, keepdim=True)).log()[:, :3].tolist()

    def score() -> dict:
        return {"logprobs": numbers(-3.0), "top_ids": [[3, 1, 2]] * length, "top_logprobs": top()}

    names = ("teacher", "right", "wrong", "degraded", "reference", "student")
    return {
        "prompt_id": prompt,
        "response_id": f"{prompt}-{seed}",
        "token_ids": list(range(length)),
        "token_mask": [int(place != 1) for place in range(length)],
        "reward": rewarded,
        "truncated": seed % 2 == 0,
        "teacher_accuracy": 0.75,
        "student_logprobs": numbers(-3.0),
        "current_logprobs": numbers(-3.0),
        "entropies": numbers(2.0),
        "kl": numbers(),
        "scores": {name: score() if teacher or name == "student" else None for name in names},
        "demonstration": {"token_ids": [1, 2], "logprobs": [-0.5, -1.0]},
    }


FULL = [
    response("wrong", 0.0, 5, seed=1),
    response("wrong", 0.0, 3, seed=2),
    response("mixed", 1.0, 6, seed=3),
    response("mixed", 0.0, 4, seed=4),
    response("mixed", 1.0, 0, seed=5),
    response("mixed", 1.0, 3, seed=6, teacher=False),
    response("unscored", None, 2, seed=7),
    response("alone", 1.0, 4, seed=8),
]


@pytest.fixture
def file_of(tmp_path):
    def write(*lines: dict, name: str = "rollouts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def ask(file: Path, method: str | None = None, *settings: str, **options) -> str:
    """What the command prints with --json."""
    given = {"step": 0, "state": None, "as_json": True, "compare": None, "html": None} | options
    printed = run_explain(file, method, settings, **given)
    assert isinstance(printed, str)
    return printed


def read_again(printed: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(printed, parse_constant=refuse)


def explained(file: Path, method: str | None = None, *settings: str, **options) -> dict:
    return read_again(ask(file, method, *settings, **options))


def advantages(one: dict) -> list[list[float]]:
    return [row["advantages"] for row in one["responses"]]


MIX = ["parts=[{weight: 1.0, method: {name: grpo}}, {weight: 0.5, method: {name: kat}}]"]


@pytest.mark.parametrize("name", METHODS)
def test_the_object_is_exactly_that_of_the_design(file_of, name):
    printed = ask(file_of(*FULL), name, *(MIX if name == "mix" else []))
    one = read_again(printed)
    assert list(one) == ["method", "responses", "loss", "metrics", "state"]
    assert one["method"]["name"] == name
    assert one["method"].keys() == METHODS[name].model_fields.keys()
    assert list(one["loss"]) == ["policy", "kl", "sft", "total"]
    assert one["loss"]["total"] == pytest.approx(one["loss"]["policy"] + one["loss"]["kl"] + one["loss"]["sft"])
    assert [row["response_id"] for row in one["responses"]] == [line["response_id"] for line in FULL]
    for row, line in zip(one["responses"], FULL, strict=True):
        assert list(row) == ["response_id", "branch", "advantages", "kl_weights", "kept"]
        assert row["branch"] in BRANCHES.get(name, {None})
        for key in ("advantages", "kl_weights", "kept"):
            assert len(row[key]) == len(line["token_ids"])
        assert set(row["kept"]) <= {0, 1}
        assert all(type(kept) is int for kept in row["kept"])
        for values in zip(row["advantages"], row["kl_weights"], row["kept"], line["token_mask"], strict=True):
            assert values[2] or values[:2] == (0, 0)
            assert values[3] or values[2] == 0
    assert all(type(mean) is float or mean is None for mean in one["metrics"].values())
    assert all(type(x) is float for numbers in one["state"].values() for x in numbers)
    assert not re.search(r"-0\.0[,\]}]", printed)


@pytest.mark.parametrize("name", METHODS)
def test_the_tables_and_the_page_show_every_method(file_of, tmp_path, name):
    page = tmp_path / "page.html"
    shown = run_explain(file_of(*FULL), name, MIX if name == "mix" else [], 0, None, False, None, page)
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    text = console.export_text()
    assert "mixed-3" in text
    assert "loss/total" in text
    assert page.read_text(encoding="utf-8").count("data-n=") == sum(len(line["token_ids"]) for line in FULL)


# Numeric fixtures of methods_core 6.6, through the file.

TEACHER, STUDENT = [-1, -2, -0.5, -3], [-1.5, -1, -0.5, -0.2]


def scored(reward: float | None, prompt: str = "p", **more) -> dict:
    line = {"prompt_id": prompt, "token_ids": [1, 2, 3, 4], "reward": reward, "student_logprobs": STUDENT}
    return line | {"scores": {"teacher": {"logprobs": TEACHER}}} | more


def test_opdvr_fixture(file_of):
    one = explained(file_of(scored(1), scored(0)), "opdvr")
    assert advantages(one) == [pytest.approx([0.5, 0, 0, 0]), pytest.approx([0, -1, 0, -2.8])]
    assert [row["kept"] for row in one["responses"]] == [[1, 0, 0, 0], [0, 1, 0, 1]]
    assert one["loss"]["policy"] == pytest.approx((-0.5 + 1 + 2.8) / 8)
    assert one["metrics"] == pytest.approx(
        {
            "gap/mean": -3.3 / 4,
            "kept/outcome_agrees": 3 / 8,
            "outcome/right": 0.5,
            "raised/mean": 0.5,
            "lowered/mean": -1.9,
        }
    )


def test_a_clipped_gap_says_how_often_it_was_clipped(file_of):
    one = explained(file_of(scored(1)), "opdvr", "ratio_clip=1")
    assert one["metrics"]["gap/at_clip"] == 0.5
    assert advantages(explained(file_of(scored(0)), "opdvr", "ratio_clip=1"))[0] == pytest.approx([0, -1, 0, -1])


@pytest.mark.parametrize(("by_std", "right", "wrong"), [("false", 0.75, 0.25), ("true", 1.5, 0.5)])
def test_grpd_fixture(file_of, by_std, right, wrong):
    one = explained(file_of(scored(1), scored(0), scored(0), scored(0)), "grpd", f"norm_by_std={by_std}")
    low = [0, -1 * wrong, 0, -2.8 * wrong]
    expected = [[0.5 * right, 0, 0, 0], low, low, low]
    assert advantages(one) == [pytest.approx(row, abs=1e-5) for row in expected]


CONTRAST = [0.05, 1, -1, 0]


def contrasted(reward: float, prompt: str = "p") -> dict:
    views = {"right": {"logprobs": [x - 2 for x in CONTRAST]}, "wrong": {"logprobs": [-2] * 4}}
    return {"prompt_id": prompt, "token_ids": [1, 2, 3, 4], "reward": reward, "student_logprobs": [-1] * 4} | {
        "scores": views
    }


def test_sipo_fixture(file_of):
    mixed = [contrasted(reward) for reward in (1, 0, 0, 0)]
    uniform = [contrasted(0, "q"), contrasted(0, "q")]
    # rewards 0.05 and -0.05: the guard engages where 0.05 - 0.1 turns the sign
    close = [contrasted(0.1, "r"), contrasted(0.0, "r")]
    one = explained(file_of(*mixed, *uniform, *close), "sipo")
    expected = [
        [0.775, 0.85, 0.65, 0.75],
        *[[-0.225, -0.15, -0.35, -0.25]] * 3,
        *[[0.025, 0.1, -0.1, 0]] * 2,
        [0.075, 0.15, 0, 0.05],
        [-0.025, 0, -0.15, -0.05],
    ]
    assert advantages(one) == [pytest.approx(row) for row in expected]
    assert one["responses"][6]["kept"] == [1, 1, 0, 1]


def test_sipo_multiplicative_fixture(file_of):
    one = explained(file_of(*(contrasted(reward) for reward in (1, 0, 0, 0))), "sipo", "form=multiplicative")
    low = [-0.24390, -0.225, -0.275, -0.25]
    expected = [[0.76923, 0.825, 0.675, 0.75], low, low, low]
    assert advantages(one) == [pytest.approx(row, abs=1e-5) for row in expected]
    later = explained(file_of(*(contrasted(r) for r in (1, 0, 0, 0))), "sipo", "form=multiplicative", step=50)
    assert advantages(later)[0] == [0.75] * 4


def degraded(gains: list[float], prompt: str = "p", kl: float = 1.0) -> dict:
    views = {"teacher": {"logprobs": [-1.0] * len(gains)}, "degraded": {"logprobs": [-1.0 - x for x in gains]}}
    return {"prompt_id": prompt, "token_ids": [0] * len(gains), "kl": [kl] * len(gains), "scores": views}


def test_va_opd_fixture_of_token_weights(file_of):
    one = explained(file_of(degraded([9, 1, 1, 1, 1])), "va_opd")
    assert one["responses"][0]["kl_weights"] == pytest.approx([0.5, 0.125, 0.125, 0.125, 0.125])
    assert one["loss"]["kl"] == pytest.approx(1.0)


def test_va_opd_fixture_of_response_weights(file_of):
    lines = [degraded([gain], kl=kl) for gain, kl in ((0.045, 1), (0.030, 10), (0.020, 100), (0.010, 1000))]
    one = explained(file_of(*lines), "va_opd")
    weights = [row["kl_weights"][0] for row in one["responses"]]
    assert weights == pytest.approx([0.65577, 0.20558, 0.09487, 0.04378], abs=1e-5)
    expected = sum(weight * 10**power for power, weight in enumerate(weights))
    assert one["loss"]["kl"] == pytest.approx(expected)


RSTG_GAP = [-0.2, 0.1, -3, -0.5, -0.05]


def guided(**more) -> dict:
    line = {
        "prompt_id": "p",
        "token_ids": [1, 2, 3, 4, 5],
        "reward": 0.0,
        "teacher_accuracy": 0.5,
        "student_logprobs": [-1.0] * 5,
        "entropies": [0.1, 1.2, 0.4, 2.0, 0.05],
        "scores": {"teacher": {"logprobs": [x - 1 for x in RSTG_GAP]}},
        "demonstration": {"token_ids": [1, 2], "logprobs": [-0.5, -1.5]},
    }
    return line | more


@pytest.mark.parametrize(("step", "beta"), [(0, 5e-3), (1, 4.95e-3), (40, 3e-3), (80, 1e-3), (200, 1e-3)])
def test_rstg_fixture(file_of, step, beta):
    one = explained(file_of(guided()), "rstg", "k_percent=60", "entropy_percentile=null", step=step)
    # s = (0.0752, 0.5967, 1, 1, 0): three of five tokens are guided
    expected = [0, *(beta * 0.5 * gap for gap in RSTG_GAP[1:4]), 0]
    assert one["responses"][0]["branch"] == "all_wrong"
    assert advantages(one)[0] == pytest.approx(expected)
    assert one["loss"]["sft"] == pytest.approx(beta * 1.0)


KAT_KL = [2, 1.8, 1.5, 1.2, 0.9, 0.5, 0.1, 0.08, 0.05, 0.04, 0.06, 0.3, 0.5]
KAT = ["window=3", "patience=3", "n_exempt=0", "min_samples=5", "warmup_steps=0"]
MINIMA = [0.02, 0.05, 0.1, 0.12, 0.2]


def test_kat_fixture(file_of, tmp_path):
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"kl_minima": MINIMA}))
    line = {"prompt_id": "p", "token_ids": [0] * 13, "kl": KAT_KL}
    one = explained(file_of(line), "kat", *KAT, state=state)
    assert one["responses"][0]["kept"] == [1] * 6 + [0] * 7
    assert one["responses"][0]["kl_weights"] == [1] * 6 + [0] * 7
    assert one["loss"]["kl"] == pytest.approx(sum(KAT_KL[:6]) / 6)
    # the least of the smoothed KL, 0.05, enters the memory
    assert one["state"]["kl_minima"] == pytest.approx([*MINIMA, 0.05])
    # an explanation is itself a state file
    state.write_text(json.dumps(one))
    again = explained(file_of(line), "kat", *KAT, state=state)
    assert len(again["state"]["kl_minima"]) == 7


def test_kat_keeps_all_before_its_memory_is_full(file_of):
    one = explained(file_of({"prompt_id": "p", "token_ids": [0] * 13, "kl": KAT_KL}), "kat", *KAT)
    assert one["responses"][0]["kept"] == [1] * 13


# Edge cases.


def test_an_unscored_response_has_no_advantage(file_of):
    one = explained(file_of(scored(1), scored(None), scored(0)), "grpo")
    high = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert advantages(one) == [pytest.approx([high] * 4), [0] * 4, pytest.approx([-high] * 4)]
    assert explained(file_of(scored(None)), "opdvr")["responses"][0]["kept"] == [0] * 4


def test_an_empty_response_is_one_with_no_tokens(file_of):
    empty = {"prompt_id": "p", "token_ids": [], "reward": 0.0}
    one = explained(file_of(scored(1), empty), "grpo")
    assert one["responses"][1] == {
        "response_id": "p/1",
        "branch": None,
        "advantages": [],
        "kl_weights": [],
        "kept": [],
    }
    # it is still a sibling, and the token mean is over four tokens
    assert one["loss"]["policy"] == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-4))


def test_a_file_of_empty_responses_has_no_loss(file_of):
    empty = {"prompt_id": "p", "token_ids": [], "reward": 1.0, "student_logprobs": [], "kl": []}
    lines = [empty, empty]
    for name in ("grpo", "kat", "opdvr"):
        one = explained(file_of(*({**line, "scores": {"teacher": {"logprobs": []}}} for line in lines)), name)
        assert one["loss"] == {"policy": 0, "kl": 0, "sft": 0, "total": 0}
    assert explained(file_of(*lines), "grpo")["metrics"]["group_advantage/mean"] is None


def test_a_group_of_one_has_no_reward_advantage(file_of):
    one = explained(file_of(scored(1)), "grpo")
    assert advantages(one) == [[0] * 4]
    assert advantages(explained(file_of(scored(1)), "opdvr"))[0] == pytest.approx([0.5, 0, 0, 0])


def test_a_failed_teacher_row_leaves_the_denominator(file_of):
    one = explained(file_of(scored(1), scored(1, scores={"teacher": None})), "opd")
    assert advantages(one)[1] == [0] * 4
    assert one["loss"]["policy"] == pytest.approx(-(0.5 - 1 - 2.8) / 4)


def test_masked_tokens_neither_train_nor_count(file_of):
    one = explained(file_of(scored(1, token_mask=[1, 0, 0, 1])), "opd")
    assert advantages(one)[0] == pytest.approx([0.5, 0, 0, -2.8])
    assert one["responses"][0]["kept"] == [1, 0, 0, 1]
    assert one["loss"]["policy"] == pytest.approx(2.3 / 2)


def test_the_ratio_is_that_of_the_current_student(file_of):
    current = [x + math.log(2) for x in STUDENT]
    one = explained(file_of(scored(1, current_logprobs=current)), "opdvr")
    # the ratio 2 is clipped to 1.2
    assert one["loss"]["policy"] == pytest.approx(-0.5 * 1.2 / 4)


def top(logprobs: list[float], ids: list[int]) -> dict:
    return {"top_ids": [ids], "top_logprobs": [logprobs]}


def supported(student: dict, teacher: dict) -> dict:
    scores = {"student": student, "teacher": {"logprobs": [-1.0]} | teacher}
    return {"prompt_id": "p", "token_ids": [1], "student_logprobs": [-1.0], "scores": scores}


P, Q = [0.5, 0.3], [0.6, 0.35]  # pitfall 8: tails 0.2 and 0.05
LOG_P, LOG_Q = [math.log(x) for x in P], [math.log(x) for x in Q]


@pytest.mark.parametrize(
    ("estimator", "value"),
    [
        # the student holds P here, so pitfall 8's "forward KL of p" is the reverse KL of the student
        ("reverse_kl", 0.5 * math.log(0.5 / 0.6) + 0.3 * math.log(0.3 / 0.35) + 0.2 * math.log(0.2 / 0.05)),
        ("forward_kl", 0.6 * math.log(0.6 / 0.5) + 0.35 * math.log(0.35 / 0.3) + 0.05 * math.log(0.05 / 0.2)),
    ],
)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_divergence_from_supports_has_a_tail(file_of, estimator, value, order):
    teacher = top([LOG_Q[i] for i in order], [[7, 9][i] for i in order])
    one = explained(file_of(supported(top(LOG_P, [7, 9]), teacher)), "opd", f"estimator={estimator}", "top_k=2")
    assert one["loss"]["kl"] == pytest.approx(value)
    assert one["responses"][0]["kl_weights"] == [1.0]
    if estimator == "reverse_kl":
        assert one["loss"]["kl"] == pytest.approx(0.1399, abs=1e-4)


def test_jsd_of_pitfall_42(file_of):
    p, q = [math.log(x) for x in (0.7, 0.2, 0.1)], [math.log(x) for x in (0.2, 0.5, 0.3)]
    file = file_of(supported(top(q, [0, 1, 2]), top(p, [0, 1, 2])))
    for estimator, value in (("forward_kl", 0.5838), ("jsd", 0.1329), ("reverse_kl", 0.5372)):
        one = explained(file, "opd", f"estimator={estimator}", "top_k=3")
        assert one["loss"]["kl"] == pytest.approx(value, abs=1e-4)


def test_a_wider_support_is_cut_to_top_k(file_of):
    line = supported(top([-3.0, *LOG_P], [1, 7, 9]), top([-4.0, *LOG_Q], [1, 7, 9]))
    narrow = supported(top(LOG_P, [7, 9]), top(LOG_Q, [7, 9]))
    for method, settings in {"opd": ["estimator=reverse_kl", "top_k=2"], "opdvr": ["top_k=2"]}.items():
        wide, exact = (explained(file_of(scored_line(x)), method, *settings) for x in (line, narrow))
        assert wide["loss"] == pytest.approx(exact["loss"])


def scored_line(line: dict) -> dict:
    return line | {"reward": 1.0}


def test_candidates_of_the_top_k_mode(file_of):
    one = explained(file_of(scored_line(supported(top(LOG_P, [7, 9]), top(LOG_Q, [9, 7][::-1])))), "opd", "top_k=2")
    # weights 5/8 and 3/8 on the gaps log(6/5) and log(7/6)
    expected = 5 / 8 * math.log(0.6 / 0.5) + 3 / 8 * math.log(0.35 / 0.3)
    assert advantages(one)[0] == [pytest.approx(expected)]


def test_supports_of_different_ids_are_refused(file_of):
    file = file_of(supported(top(LOG_P, [7, 9]), top(LOG_Q, [7, 8])))
    with pytest.raises(DataError, match=r"scores.student.top_ids and scores.teacher.top_ids hold different ids"):
        explained(file, "opd", "estimator=forward_kl", "top_k=2")


def test_a_measured_kl_goes_before_one_from_supports(file_of):
    line = supported(top(LOG_P, [7, 9]), top(LOG_Q, [7, 9])) | {"kl": [0.5]}
    assert explained(file_of(line), "opd", "estimator=reverse_kl", "top_k=2")["loss"]["kl"] == 0.5


def test_a_full_reverse_kl_is_not_guessed_from_a_support(file_of):
    file = file_of(supported(top(LOG_P, [7, 9]), top(LOG_Q, [7, 9])))
    with pytest.raises(MissingMeasurement, match="needs kl"):
        explained(file, "opd", "estimator=reverse_kl")


MISSING = {
    "grpo": ("reward", {"reward"}),
    "opdvr": ("scores.teacher", {"scores"}),
    "opd": ("student_logprobs", {"student_logprobs", "current_logprobs"}),
    "sipo": ("scores.wrong", {"wrong"}),
    "va_opd": ("scores.degraded", {"degraded"}),
    "rstg": ("entropies", {"entropies"}),
    "kat": ("kl", {"kl", "student"}),
    "sft": ("demonstration", {"demonstration"}),
    "exopd": ("scores.reference", {"reference"}),
}


@pytest.mark.parametrize(("name", "missing", "keys"), [(k, *v) for k, v in MISSING.items()], ids=MISSING)
def test_a_missing_measurement_is_named(file_of, name, missing, keys):
    lines = []
    for line in FULL:
        kept = {key: value for key, value in line.items() if key not in keys}
        if "scores" in kept:
            kept["scores"] = {view: score for view, score in kept["scores"].items() if view not in keys}
        lines.append(kept)
    with pytest.raises(MissingMeasurement, match=rf"the method needs {missing}\b"):
        ask(file_of(*lines), name)


def test_rstg_needs_the_teachers_accuracy(file_of):
    with pytest.raises(MissingMeasurement, match="teacher_accuracy"):
        ask(file_of(*({k: v for k, v in line.items() if k != "teacher_accuracy"} for line in FULL)), "rstg")


def test_sampled_scores_and_text_scores_are_missed_by_name(file_of):
    support = [supported(top(LOG_P[:1], [7]), top([-1.0], [7]))]
    del support[0]["scores"]["teacher"]["logprobs"]
    with pytest.raises(MissingMeasurement, match=r"scores.teacher.logprobs"):
        ask(file_of(*support), "opd")
    with pytest.raises(MissingMeasurement, match=r"demonstration.logprobs"):
        ask(file_of({"prompt_id": "p", "token_ids": [], "demonstration": {"token_ids": [1]}}), "sft")
    with pytest.raises(MissingMeasurement, match=r"scores.student.top"):
        ask(file_of(scored(1)), "opd", "estimator=jsd", "top_k=2")


def test_truncated_is_needed_only_by_a_policy_that_reads_it(file_of):
    ask(file_of(scored(1)), "opdvr")
    with pytest.raises(MissingMeasurement, match="needs truncated"):
        ask(file_of(scored(1)), "opdvr", "truncated=skip")


def test_a_malformed_record_is_an_error_of_the_data(file_of):
    with pytest.raises(DataError, match=r"line 1 \(response p/0\): kl has 2 entries for 4 token_ids"):
        ask(file_of(scored(1, kl=[0.1, 0.2])), "grpo")


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
    assert method_from("kdrl", ["beta=0.5"]).model_dump()["beta"] == 0.5


def test_a_mixture_adds_weighted_credit_and_keeps_its_parts_apart(file_of):
    parts = "parts=[{weight: 1.0, method: {name: grpo, scale: none}}, {weight: 0.5, method: {name: opd}}]"
    one = explained(file_of(scored(1), scored(0)), "mix", parts)
    gap = [0.5, -1, 0, -2.8]
    expected = [[sign * 0.5 + 0.5 * x for x in gap] for sign in (1, -1)]
    assert advantages(one) == [pytest.approx(row) for row in expected]
    assert one["metrics"].keys() == {"grpo/group_advantage/mean", "grpo/group_advantage/uniform", "opd/gap/mean"}


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
    with pytest.raises(HybridError, match=r"the policy loss of grpo_opd is inf; look for extreme log-probs"):
        ask(file_of(far), "grpo_opd")
    farther = scored(1, scores={"teacher": {"logprobs": [1.7e308] * 4}}, student_logprobs=[-1.7e308] * 4)
    with pytest.raises(HybridError, match=r"signal 'gap' must be finite where it is known; got inf"):
        ask(file_of(farther), "opd")


# Files that a training wrote, one step after the other.


def written(step: int, gap: float) -> dict:
    return {
        "step": step,
        "prompt_id": f"{step}/0",
        "token_ids": [1],
        "student_logprobs": [-1.0],
        "scores": {"teacher": {"logprobs": [gap - 1]}},
        "advantages": [9.0],
        "kl_weights": [9.0],
        "kept": [1],
    }


def test_one_step_of_a_training_is_explained_at_a_time(file_of):
    file = file_of(written(3, 0.5), written(4, 0.25), written(4, 0.75))
    parts = "parts=[{weight: {start: 1.0, end: 0.0, steps: 8}, method: {name: opd}}]"
    # the step chooses the lines and is the step of the schedule; what the training wrote is not read
    assert advantages(explained(file, "mix", parts, step=4)) == [[0.125], [0.375]]
    assert advantages(explained(file, "mix", parts, step=None)) == [[0.5 * 5 / 8]]
    with pytest.raises(DataError, match=r"has no line of step 0; choose one of 3 to 4 with --step"):
        ask(file, "opd")


def test_a_step_stands_in_every_line_or_in_none(file_of):
    with pytest.raises(DataError, match=r"line 2 .*step is missing, and other lines have it"):
        ask(file_of(written(0, 0.5), scored(1)), "opd")


# Comparing.


def test_a_comparison_lists_the_tokens_that_methods_treat_differently(file_of):
    both = explained(file_of(scored(1), scored(0)), compare="opd,opdvr", method=None)
    assert both.keys() == {"methods", "differences", "agreements"}
    assert both["methods"]["opdvr"] == explained(file_of(scored(1), scored(0)), "opdvr")
    assert [(one["response_id"], one["token"]) for one in both["differences"]] == [("p/0", 1), ("p/0", 3), ("p/1", 0)]
    assert both["differences"][0] == {
        "response_id": "p/0",
        "token": 1,
        "token_id": 2,
        "treatments": {"opd": "down", "opdvr": "not trained"},
        "advantages": {"opd": -1.0, "opdvr": 0.0},
        "kl_weights": {"opd": 0.0, "opdvr": 0.0},
        "kept": {"opd": 1, "opdvr": 0},
    }
    assert both["agreements"] == [{"methods": ["opd", "opdvr"], "share": 5 / 8}]


def test_three_methods_may_be_compared_with_their_own_settings(file_of, tmp_path):
    path = tmp_path / "strict.yaml"
    path.write_text("name: opdvr\n")
    file = file_of(scored(1), scored(0))
    three = explained(file, None, "strict.thr=1", "opd.ratio_clip=0.1", compare=f"opd,opdvr,{path}")
    assert three["methods"]["strict"]["method"]["thr"] == 1
    assert three["methods"]["opd"]["method"]["ratio_clip"] == 0.1
    assert len(three["agreements"]) == 3
    table = run_explain(file, None, [], 0, None, False, "opd,opdvr,grpo", None)
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table)
    assert "5 tokens treated differently" in captured.get()
    assert "opd and grpo treat 37.5% of the tokens alike" in captured.get()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": None, "compare": None}, "needs --method NAME or --compare"),
        ({"method": "opd", "compare": "opd,grpo"}, "not both"),
        ({"method": None, "compare": "opd"}, "two or more different methods"),
        ({"method": None, "compare": "opd,opd"}, "two or more different methods"),
        ({"method": None, "compare": "opd,grppo"}, "did you mean grpo?"),
    ],
)
def test_what_cannot_be_compared_is_refused(file_of, given, message):
    with pytest.raises(ConfigError) as caught:
        ask(file_of(scored(1)), **given)
    assert message in str(caught.value)


def test_a_setting_says_which_of_the_compared_methods_it_is_for(file_of):
    with pytest.raises(ConfigError, match=r"begin with the method's name, as in --set opd.key=value"):
        ask(file_of(scored(1)), None, "thr=1", compare="opd,opdvr")


class Page(HTMLParser):
    """What a browser would read of the page."""

    def __init__(self):
        super().__init__()
        self.tokens: list[tuple[str, str]] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if "data-n" in named:
            self.tokens.append((named.get("class") or "", named["data-n"] or ""))
        self.foreign += [value for key, value in attrs if key in ("src", "href") and value]


def test_the_page_colours_each_token_and_needs_no_network(file_of, tmp_path):
    html = tmp_path / "page.html"
    line = scored(1, tokens=["<b>", " is", "\n", "2"], prompt="1 < 2 & 3", completion="...")
    printed = run_explain(file_of(line, scored(0)), None, [], 0, None, False, "opd,opdvr", html)
    assert not isinstance(printed, str)
    text = html.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert len(page.tokens) == 16
    assert page.foreign == []
    assert "http" not in text.replace("http-equiv", "")
    assert page.tokens[0] == (
        "t up",
        "token 0, id 1: up\nadvantage 0.5\nkl weight 0\nstudent -1.5\nteacher -1",
    )
    # opd lowers the second token, opdvr leaves it
    assert page.tokens[1][0] == "t down diff"
    assert page.tokens[5][0] == "t off diff"
    assert "&lt;b&gt;" in text
    assert "1 &lt; 2 &amp; 3" in text
    assert "62.5%" in text


def test_the_function_gives_the_object_of_the_command(file_of):
    file = file_of(*FULL)
    assert explain(method_from("opdvr"), read_records(file)) == explained(file, "opdvr")
