import io
import math
import re

import pytest
from rich.console import Console

from hybrid.errors import DataError, MissingMeasurement
from hybrid.explain import explain
from hybrid.explain_command import method_from, run_explain
from hybrid.methods import METHODS
from hybrid.records import read_records
from tests.explaining import FULL, STUDENT, advantages, ask, explained, read_again, scored, written_to


@pytest.fixture
def file_of(tmp_path):
    return lambda *lines: written_to(tmp_path / "rollouts.jsonl", *lines)


BRANCHES = {"rstg": {"all_wrong", "mixed", None}}


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
    with pytest.raises(
        DataError, match=r"response p/0: scores.student.top_ids\[0\] and scores.teacher.top_ids\[0\] hold"
    ):
        explained(file, "opd", "estimator=forward_kl", "top_k=2")


def test_what_both_sides_hold_is_found_by_id_in_two_lists(file_of):
    wide = supported(top([*LOG_P, -3.0], [7, 9, 4]), top([-0.9, -1.2, -2.0], [8, 7, 9]))
    own = "top_k=2", "support=intersection"
    # the top 2 of the student are 7 and 9, of the teacher 8 and 7
    assert advantages(explained(file_of(scored_line(wide)), "opd", *own))[0] == [pytest.approx(-1.2 - LOG_P[0])]
    nothing = supported(top(LOG_P, [7, 9]), top(LOG_Q, [8, 4]))
    one = explained(file_of(scored_line(nothing)), "opdvr", *own)
    assert (one["loss"]["total"], advantages(one)[0]) == (0.0, [0.0])
    with pytest.raises(DataError, match="hold different ids; record both on one support"):
        explained(file_of(scored_line(wide)), "opd", "top_k=2", "support=union")


def test_candidates_of_either_side_are_cut_from_a_wider_support(file_of):
    line = scored_line(supported(top([-0.5, -1.5, -2.5], [4, 7, 9]), top([-2.0, -3.0, -0.2], [4, 7, 9])))
    for support, kept in {"student": [-1.5, -1.5], "teacher": [-1.5, 2.3], "union": [-1.5, -1.5, 2.3]}.items():
        settings = ["top_k=2", f"support={support}", "candidate_weight=none"]
        assert advantages(explained(file_of(line), "opd", *settings))[0] == [pytest.approx(sum(kept))]


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


def test_the_function_gives_the_object_of_the_command(file_of):
    file = file_of(*FULL)
    assert explain(method_from("opdvr"), read_records(file)) == explained(file, "opdvr")
