import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hybrid.compare.load import last_value
from hybrid.compare.summary import evaluation_metrics, method_names, summarise
from hybrid.errors import HybridError


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
    assert "1 of 2 pairs failed and is in none of these numbers" in comparison.sentence
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


def test_mistakes_are_named(runs):
    with pytest.raises(HybridError, match="baseline 'gpro' is none of the methods that ran: grpo, opd, opdvr"):
        method_names(runs, "gpro")
    with pytest.raises(HybridError, match=r"no run has the metric 'eval/avg_at_8'; .*: eval/avg_at_4, eval/pass_at_4"):
        summarise(runs, metric="eval/avg_at_8", baseline="grpo")
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
