"""Numeric fixtures of the five core methods, through a record file."""

import json

import pytest

from tests.experiments import ROOT
from tests.explaining import advantages, explained, scored, written_to


@pytest.fixture
def file_of(tmp_path):
    return lambda *lines: written_to(tmp_path / "rollouts.jsonl", *lines)


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
            "credit/right": 0.5 / 4,
            "credit/wrong": -3.8 / 4,
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


def test_the_rollouts_of_a_real_model_that_ship_can_be_explained():
    # one step of experiments/smollm2.yaml: four prompts with eight responses, scored by a Gemma and under two contexts
    file = ROOT / "experiments" / "smollm2_rollouts.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 32
    for method in ("grpo", "opdvr", "sipo"):
        one = explained(file, method)
        assert [row["response_id"] for row in one["responses"]] == [line["response_id"] for line in lines]
    for row, line in zip(explained(file, "opdvr")["responses"], lines, strict=True):
        gaps = [t - s for t, s in zip(line["scores"]["teacher"]["logprobs"], line["student_logprobs"], strict=True)]
        sign = 2 * line["reward"] - 1
        assert row["kept"] == [int(sign * gap > 0) for gap in gaps]
        assert row["advantages"] == pytest.approx([gap * kept for gap, kept in zip(gaps, row["kept"], strict=True)])
