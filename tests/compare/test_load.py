import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hybrid.compare.load import cost_curve, first_value, last_value, latest_of_each_cell, load_runs
from hybrid.errors import DataError
from hybrid.mlflow_store import default_uri, open_client
from hybrid.tracking import Tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One parent with two trainings, one of them crashed, and one training of another parent."""
    folder = tmp_path_factory.mktemp("store")

    def open_run(name, parent=None, **tags):
        return Tracker.open(
            uri=None,
            experiment="study",
            run_name=name,
            folder=folder / name,
            tags={f"hybrid.{key}": value for key, value in tags.items()},
            runs_dir=folder,
            parent_run_id=parent,
        )

    parent = Tracker.open_parent(
        uri=None, experiment="study", run_name="sweep", folder=folder / "p", tags={}, runs_dir=folder
    )
    with open_run("a", parent.run_id, kind="training", method="grpo", seed="0", task="sums") as run:
        run.params({"lr": 1e-6})
        run.metrics({"eval/avg@4": 0.25, "rollouts/total": 0}, 0)
        for step in range(1, 5):
            run.metrics({"rollouts/total": 32 * step, "loss": 1 / step}, step)
        run.metrics({"loss": math.nan}, 5)
        run.metrics({"eval/avg@4": 0.5}, 4)
        (folder / "rollouts.jsonl").write_text("{}\n")
        run.artifact_file(folder / "rollouts.jsonl", "rollouts")
    crashed = open_run("b", parent.run_id, kind="training", method="opd", seed="0", task="sums")
    crashed.metrics({"eval/avg@4": 0.9}, 0)
    crashed.close("FAILED")
    with open_run("c", None, kind="training", method="opd", seed="1", task="sums") as other:
        other.metrics({"eval/avg@4": 0.7}, 0)
    parent.close()
    return default_uri(folder), parent.run_id, run.run_id


def test_trainings_come_back_with_curves_tags_and_artifacts(store):
    uri, parent, run_id = store
    run, crashed = load_runs(uri=uri, experiment="study", parent_run_id=parent)
    assert (run.method, run.seed, run.task, run.status, run.run_id) == ("grpo", 0, "sums", "FINISHED", run_id)
    assert run.params == {"lr": "1e-06"}
    assert_allclose(run.curves["eval/avg_at_4"], ([0, 4], [0.25, 0.5]))
    assert_allclose(run.curves["loss"], ([1, 2, 3, 4, 5], [1, 1 / 2, 1 / 3, 1 / 4, math.nan]))
    assert run.artifacts is not None
    assert (run.artifacts / "rollouts" / "rollouts.jsonl").read_text() == "{}\n"
    assert (crashed.method, crashed.status) == ("opd", "FAILED")
    assert len(load_runs(uri=uri, experiment="study")) == 3


def test_only_a_finished_run_has_a_result(store):
    uri, parent, _ = store
    run, crashed = load_runs(uri=uri, experiment="study", parent_run_id=parent)
    assert last_value(run, "eval/avg_at_4") == 0.5
    assert math.isnan(last_value(run, "loss"))
    assert math.isnan(last_value(crashed, "eval/avg_at_4"))
    assert first_value(crashed, "eval/avg_at_4") == 0.9
    assert math.isnan(first_value(crashed, "eval/pass_at_4"))


def test_a_step_that_another_program_logged_twice_counts_once_and_as_it_was_repeated(store):
    uri, parent, run_id = store
    open_client(uri).log_metric(run_id, "eval/avg_at_4", 0.75, step=4)
    run = load_runs(uri=uri, experiment="study", parent_run_id=parent)[0]
    assert_allclose(run.curves["eval/avg_at_4"], ([0, 4], [0.25, 0.75]))


def test_values_over_a_running_total(store):
    uri, parent, _ = store
    run, crashed = load_runs(uri=uri, experiment="study", parent_run_id=parent)
    assert_allclose(cost_curve(run, "eval/avg_at_4", "rollouts/total")[0], [0, 128])
    # losses at steps 1 to 5, of which the last step has no total of its own
    assert_allclose(cost_curve(run, "loss", "rollouts/total")[0], [32, 64, 96, 128, 128])
    assert cost_curve(crashed, "eval/avg_at_4", "rollouts/total")[0].size == 0


def test_a_total_is_zero_before_its_first_point(runs):
    totals, values = cost_curve(runs[0], "eval/avg_at_4", "rollouts/total")
    assert_allclose(totals, 32 * np.arange(0, 101, 10))
    assert len(values) == 11


def test_what_is_not_there_is_named(store):
    uri, _, run_id = store
    with pytest.raises(DataError, match=r"no experiment 'stduy'; it has: .*study"):
        load_runs(uri=uri, experiment="stduy")
    with pytest.raises(DataError, match="no training under the run abc"):
        load_runs(uri=uri, experiment="study", parent_run_id="abc")
    client = open_client(uri)
    client.set_tag(run_id, "hybrid.seed", "first")
    with pytest.raises(DataError, match=r"'a' has the tag hybrid\.seed = 'first', which is no integer"):
        load_runs(uri=uri, experiment="study")
    client.delete_tag(run_id, "hybrid.seed")
    with pytest.raises(DataError, match=r"'a' has no tag 'hybrid\.seed'"):
        load_runs(uri=uri, experiment="study")
    client.set_tag(run_id, "hybrid.seed", "0")


def test_the_latest_of_each_cell_is_kept_and_the_others_are_returned(made_run):
    old, new, other = made_run("opd", 0, start_ms=1), made_run("opd", 0, start_ms=2), made_run("opd", 1)
    assert latest_of_each_cell([new, old, other]) == ([new, other], [old])
