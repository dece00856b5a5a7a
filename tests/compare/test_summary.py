import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hybrid.compare.load import last_value
from hybrid.compare.summary import evaluation_metrics, method_names, summarise
from hybrid.errors import HybridError

AVG = {"metric": "eval/avg_at_4", "baseline": "grpo"}


def test_a_summary_by_hand(made_run):
    def run(method, seed, values, status="FINISHED"):
        steps = np.array([0.0, 10, 20])[: len(values)]
        rollouts = (np.array([10.0, 20]), np.array([100.0, 200]))
        curves = {"eval/avg_at_4": (steps, np.array(values)), "rollouts/total": rollouts}
        return replace(made_run(method, seed, status=status), curves=curves)

    runs = [
        run("grpo", 0, [0.2, 0.3, 0.4]),
        run("grpo", 1, [0.2, 0.4, 0.6]),
        run("opd", 0, [0.2, 0.5, 0.6]),
        run("opd", 1, [0.2, 0.9], "FAILED"),
    ]
    found = summarise(runs, metric="eval/avg_at_4", baseline="grpo")
    assert found.target_of_task == {"sums": 0.5}  # the mean of 0.4 and 0.6
    grpo, opd = found.results
    assert_allclose([grpo.before.value, grpo.after.value, opd.after.value], [0.2, 0.5, 0.6])
    assert (opd.num_runs, opd.num_failed, opd.after.num_failed) == (2, 1, 1)
    assert_allclose(grpo.area.value, 0.35)  # 0.3 and 0.4
    assert opd.area.num_failed == 1  # the failed run never saw step 20
    assert opd.costs["steps"].median.value == 10
    assert opd.costs["rollouts"].num_reached == 2  # it reached the target before it failed
    assert (grpo.costs["rollouts"].median.value, grpo.costs["rollouts"].num_censored) == (200, 1)
    assert "seconds" not in grpo.costs
    (comparison,) = found.comparisons
    assert comparison.seeds == [0, 1]
    assert_allclose(comparison.differences, [0.2, math.nan])
    assert comparison.found.num_failed == 1
    assert "1 of 2 pairs lacks a result (failed, not finished or not run) and is in none" in comparison.sentence
    assert found.across == []


def test_all_tasks_and_methods_are_there_and_holm_runs_over_the_methods_of_a_task(runs):
    found = summarise(runs, metric="eval/avg_at_4", baseline="grpo", target=0.3)
    assert [(row.task, row.method) for row in found.results] == [
        (task, method) for task in ("sums", "words") for method in ("grpo", "opd", "opdvr")
    ]
    assert {one.method: one.found.p_value for one in found.comparisons if one.task == "words"} == {
        "opd": 2 / 256,
        "opdvr": 2 / 256,
    }
    assert [one.found.p_holm for one in found.comparisons if one.task == "words"] == [4 / 256, 4 / 256]
    assert [row.improvement is None for row in found.across] == [True, False, False]
    assert found.across[0].middle.num_failed == 0
    assert found.across[1].middle.num_failed == 1


def test_a_seed_that_was_never_run_is_a_failed_pair(runs):
    without = [run for run in runs if (run.method, run.seed) != ("opdvr", 5)]
    found = summarise(without, metric="eval/avg_at_4", baseline="grpo")
    comparison = next(one for one in found.comparisons if one.method == "opdvr")
    assert (comparison.found.num_pairs, comparison.found.num_failed) == (7, 1)
    assert list(comparison.seeds) == list(range(8))


def test_a_method_whose_runs_all_failed_is_shown_and_is_no_winner(runs):
    failed = [replace(run, status="FAILED") if run.method == "opdvr" else run for run in runs]
    found = summarise(failed, metric="eval/avg_at_4", baseline="grpo")
    row = next(row for row in found.results if row.method == "opdvr")
    assert math.isnan(row.after.value)
    assert row.num_failed == 8
    sentence = next(one.sentence for one in found.comparisons if one.method == "opdvr")
    assert "cannot be compared" in sentence


def test_a_longer_training_is_told_and_areas_end_where_the_shorter_one_does(made_run):
    def run(method, seed, values):
        curve = np.array([0.0, 10, 20])[: len(values)], np.array(values)
        return replace(made_run(method, seed), curves={"eval/avg_at_4": curve})

    short = [run("grpo", seed, [0.2, 0.4]) for seed in range(6)]
    found = summarise([*short, *(run("opd", seed, [0.2, 0.4, 0.9]) for seed in range(6))], **AVG)
    assert [row.area.value for row in found.results] == pytest.approx([0.3, 0.3])
    assert found.comparisons[0].sentence.endswith("; opd was measured after 20 steps, grpo after 10.")


def test_a_run_that_was_measured_at_its_end_alone_has_no_start(made_run):
    lone = replace(made_run("grpo", 0), curves={"eval/avg_at_4": (np.array([20.0]), np.array([0.5]))})
    (row,) = summarise([lone], **AVG).results
    assert math.isnan(row.before.value)
    assert (row.after.value, row.area.num_failed) == (0.5, 1)
    assert row.costs["steps"].median.value == 20


def test_the_area_is_of_finished_runs_as_the_end_is(made_run):
    runs = [made_run("grpo", seed) for seed in range(3)]
    (row,) = summarise([*runs, replace(made_run("grpo", 3), status="FAILED")], **AVG).results
    assert (row.after.num, row.area.num) == (3, 3)


def test_a_method_that_has_no_run_of_a_task_has_not_failed(runs):
    some = [run for run in runs if (run.method, run.task) != ("opdvr", "words")]
    found = summarise(some, **AVG)
    row = next(row for row in found.results if (row.method, row.task) == ("opdvr", "words"))
    assert (row.num_runs, row.num_failed) == (0, 0)
    said = next(one.sentence for one in found.comparisons if (one.method, one.task) == ("opdvr", "words"))
    assert said == "opdvr and grpo cannot be compared: no run of opdvr is of this task."
    without = [run for run in runs if (run.method, run.task) != ("grpo", "words")]
    said = {one.sentence for one in summarise(without, **AVG).comparisons if one.task == "words"}
    assert said == {
        "opd and grpo cannot be compared: no run of grpo is of this task.",
        "opdvr and grpo cannot be compared: no run of grpo is of this task.",
    }


def test_mistakes_are_named(runs):
    with pytest.raises(HybridError, match="baseline 'gpro' is none of the methods that ran: grpo, opd, opdvr"):
        method_names(runs, "gpro")
    with pytest.raises(
        HybridError, match=r"no metric 'eval/avg_at_8' is in any run, .*: eval/avg_at_4, eval/pass_at_4"
    ):
        summarise(runs, metric="eval/avg_at_8", baseline="grpo")
    with pytest.raises(
        HybridError, match="no metric 'train/loss' is a share of right answers, of which more is better"
    ):
        summarise(runs, metric="train/loss", baseline="grpo")
    with pytest.raises(HybridError, match=r"target is a share between 0 and 1, such as 0\.5 for 50 %; got 50"):
        summarise(runs, metric="eval/avg_at_4", baseline="grpo", target=50)
    with pytest.raises(HybridError, match=r"wanted is a share above 0 .*; got 0"):
        summarise(runs, metric="eval/avg_at_4", baseline="grpo", wanted=0)
    with pytest.raises(HybridError, match="stand there twice"):
        summarise([*runs, runs[0]], metric="eval/avg_at_4", baseline="grpo")


def test_evaluations_stand_in_order(runs, made_run):
    named = dict.fromkeys(
        ["eval/pass_at_16", "eval/pass_at_4", "eval/avg_at_16", "reward", "eval/length"], runs[0].curves["reward"]
    )
    assert evaluation_metrics([replace(made_run("opd", 0), curves=named)]) == [
        "eval/avg_at_16",
        "eval/pass_at_4",
        "eval/pass_at_16",
    ]
    assert not math.isnan(last_value(runs[0], "eval/avg_at_4"))
