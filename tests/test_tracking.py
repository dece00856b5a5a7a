"""The tracker against real MLflow stores: SQLite files, and a server on loopback that is killed and started again."""

import json
import math
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.delivery import read_buffer
from hybrid.environment import environment
from hybrid.mlflow_store import TrackingError, default_uri, open_client
from hybrid.tracking import BUFFER_NAME, Tracker, flatten, permitted_name, replay
from tests.mlflow_server import mlflow_server

LONE_SURROGATE = "half a pair \ud800 here"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def open_tracker(runs_dir, tmp_path):
    def open_one(**changes):
        settings = {
            "uri": None,
            "experiment": "trial",
            "run_name": "opdvr seed 0",
            "folder": tmp_path / "run",
            "tags": {"hybrid.method": "opdvr"},
            "runs_dir": runs_dir,
        }
        return Tracker.open(**{**settings, **changes})

    return open_one


def stored(tracker):
    return open_client(tracker.uri).get_run(tracker.run_id)


def history(tracker, name):
    return [(m.step, m.value) for m in open_client(tracker.uri).get_metric_history(tracker.run_id, name)]


def artifact(tracker, name, tmp_path):
    return Path(open_client(tracker.uri).download_artifacts(tracker.run_id, name, str(tmp_path)))


def test_metrics_arrive_in_order_with_one_point_a_step(open_tracker):
    with open_tracker() as tracker:
        for step in range(300):
            tracker.metrics({"reward": step / 300, "train/loss": -step}, step)
    assert history(tracker, "reward") == [(step, step / 300) for step in range(300)]
    assert history(tracker, "train/loss") == [(step, -float(step)) for step in range(300)]
    assert stored(tracker).info.status == "FINISHED"


def test_flush_is_exact(open_tracker):
    with open_tracker() as tracker:
        for step in range(5):
            tracker.metrics({"reward": 1.0}, step)
            assert tracker.flush()
            assert len(history(tracker, "reward")) == step + 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, np.float32("nan")])
def test_what_is_not_a_finite_number_is_counted_and_not_sent(open_tracker, bad):
    with open_tracker() as tracker:
        tracker.metrics({"loss": 2.0, "reward": np.float64(0.5)}, 0)
        tracker.metrics({"loss": bad, "reward": np.float32(0.25)}, 1)
    assert history(tracker, "loss") == [(0, 2.0)]
    assert history(tracker, "nonfinite/loss") == [(1, 1.0)]
    assert history(tracker, "reward") == [(0, 0.5), (1, 0.25)]
    best = open_client(tracker.uri).search_runs([stored(tracker).info.experiment_id], order_by=["metrics.loss ASC"])
    assert all(math.isfinite(run.data.metrics["loss"]) for run in best if "loss" in run.data.metrics)


def test_refused_names_are_changed_and_the_name_that_was_meant_is_kept(open_tracker):
    long = "x" * 400
    with open_tracker() as tracker:
        tracker.metrics({"eval/avg@4": 0.5, "a\\b": 1.0, "a?b": 2.0, "../up": 3.0, long: 4.0}, 1)
        tracker.metrics({"a?b": 5.0}, 2)
    run = stored(tracker)
    assert history(tracker, "eval/avg_at_4") == [(1, 0.5)]
    assert run.data.tags["original_name/eval/avg_at_4"] == "eval/avg@4"
    assert history(tracker, "a_b") == [(1, 1.0)]
    second = next(name for name, meant in run.data.tags.items() if meant == "a?b").removeprefix("original_name/")
    assert history(tracker, second) == [(1, 2.0), (2, 5.0)]
    assert run.data.metrics["__/up"] == 3.0
    assert sorted(run.data.metrics.values()) == [0.5, 1.0, 3.0, 4.0, 5.0]


@given(st.text(max_size=300))
def test_every_name_has_one_that_mlflow_takes(name):
    from mlflow.utils.validation import _validate_metric

    _validate_metric(permitted_name(name), 1.0, 0, 0)
    assert permitted_name(permitted_name(name)) == permitted_name(name)


def test_settings_are_flat_and_long_ones_are_whole_in_an_artifact(open_tracker, tmp_path):
    template = "{% for message in messages %}\n" * 240
    with open_tracker() as tracker:
        tracker.params({"student": {"lr": 1e-6, "template": template}, "seed": 3, "k" * 300: "v"})
    params = stored(tracker).data.params
    assert params["student.lr"] == "1e-06"
    assert params["seed"] == "3"
    assert params["student.template"].startswith("sha256:")
    assert len(params["student.template"]) < 50
    assert artifact(tracker, "params/student.template.txt", tmp_path).read_text() == template
    assert [value for key, value in params.items() if key.startswith("kkk")] == ["v"]


def test_flatten_numbers_lists_of_mappings_and_keeps_other_lists():
    values = {"method": {"parts": [{"name": "grpo"}, {"name": "opd"}], "clip": [0.2, 0.3]}, "x": None, "empty": {}}
    assert flatten(values) == {
        "method.parts.0.name": "grpo",
        "method.parts.1.name": "opd",
        "method.clip": "[0.2, 0.3]",
        "x": "null",
        "empty": "{}",
    }


def test_a_changed_setting_on_resume_is_a_tag_and_the_run_goes_on(open_tracker):
    with open_tracker() as tracker:
        tracker.params({"lr": 1e-6, "seed": 3})
    for resume, lr in [(1, 2e-6), (2, 3e-6)]:
        with open_tracker(run_id=tracker.run_id) as again:
            again.params({"lr": lr, "seed": 3})
            again.metrics({"reward": 1.0}, resume)
            again.flush()
            assert stored(again).info.status == "RUNNING"
    run = stored(tracker)
    assert run.data.params == {"lr": "1e-06", "seed": "3"}
    changes = {key: value for key, value in run.data.tags.items() if key.startswith("resume/")}
    assert changes == {"resume/1/lr": "2e-06", "resume/2/lr": "3e-06"}
    assert history(tracker, "reward") == [(1, 1.0), (2, 1.0)]
    assert run.info.status == "FINISHED"
    assert again.num_refused == 0


def test_steps_that_come_again_after_a_kill_have_one_point_and_one_table(open_tracker, tmp_path):
    first = open_tracker()
    for step in range(4):
        first.metrics({"loss": 0.5 * step}, step)
        first.table(f"completions/step_{step}", [{"text": "yes"}])
    first.metrics({"held_out": 0.25}, 4)  # and killed before the loss of this step
    assert first.flush()
    with open_tracker(run_id=first.run_id) as again:
        for step in range(2, 6):
            again.metrics({"loss": 0.5 * step, "held_out": step / 16, "new": 1.0}, step)
            again.table(f"completions/step_{step}", [{"text": "yes"}])
    assert history(again, "loss") == [(step, 0.5 * step) for step in range(6)]
    assert history(again, "held_out") == [(4, 0.25), (5, 5 / 16)]
    assert history(again, "new") == [(step, 1.0) for step in range(2, 6)]
    for step in range(6):
        table = json.loads(artifact(again, f"completions/step_{step}.json", tmp_path).read_text())
        assert table == {"columns": ["text"], "data": [["yes"]]}


def test_children_stand_under_one_parent_for_an_experiment_file(open_tracker, runs_dir, tmp_path):
    def open_parent():
        return Tracker.open_parent(
            uri=None,
            experiment="trial",
            run_name="quickstart",
            folder=tmp_path / "parent",
            tags={"mlflow.note.content": "what it is"},
            runs_dir=runs_dir,
        )

    with open_parent() as parent, open_tracker(parent_run_id=parent.run_id) as child:
        child.metrics({"reward": 1.0}, 0)
    with open_parent() as again:
        pass
    assert again.run_id == parent.run_id
    assert stored(parent).data.tags["hybrid.kind"] == "parent"
    assert stored(child).data.tags["mlflow.parentRunId"] == parent.run_id


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_leaving_sets_the_status(open_tracker, error, status):
    tracker = open_tracker()
    if error is None:
        with tracker:
            pass
    else:
        with pytest.raises(error), tracker:
            raise error
    tracker.close("FAILED")  # a second close changes nothing
    assert stored(tracker).info.status == status


def test_tables_keep_what_a_model_can_say(open_tracker, monkeypatch):
    said = ["plain", "é 😀 \u202e \x00 \x1b[31m", '"quotes", \n\t<b>&amp;</b>', LONE_SURROGATE]
    rows = [
        {"step": 4, "prompt": "p", "completion": text, "reward": np.float32(0.5), "gap": math.nan, "parts": [1.0, None]}
        for text in said
    ]
    with open_tracker() as tracker:
        tracker.table("completions", rows)
        tracker.table("completions", [{"step": 5, "prompt": "p", "completion": "later", "reward": 1.0}])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)  # load_table looks there, whatever its client's address
    table = open_client(tracker.uri).load_table(
        stored(tracker).info.experiment_id, "completions.json", run_ids=[tracker.run_id]
    )
    assert table["completion"].tolist() == [*said[:3], "half a pair \\ud800 here", "later"]
    assert table["reward"].tolist() == [0.5] * 4 + [1.0]
    assert [math.isnan(gap) for gap in table["gap"]] == [True] * 5
    assert table["step"].tolist() == [4, 4, 4, 4, 5]
    assert tracker.num_refused == 0


def test_a_long_run_may_have_more_tables_than_mlflow_can_list(open_tracker, tmp_path):
    with open_tracker() as tracker:
        for step in range(90):
            tracker.table(f"completions/step_{step:06d}.json", [{"step": step, "completion": "é"}])
        tracker.table("completions/step_000003.json", [{"step": 3, "completion": "later"}])
    listed = json.loads(stored(tracker).data.tags["mlflow.loggedArtifacts"])
    assert 50 < len(listed) < 90
    for step, rows in [(3, [[3, "é"], [3, "later"]]), (89, [[89, "é"]])]:
        table = json.loads(artifact(tracker, f"completions/step_{step:06d}.json", tmp_path).read_text())
        assert table == {"columns": ["step", "completion"], "data": rows}
    assert tracker.num_refused == 0


def test_text_of_every_kind_is_kept(open_tracker, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# notes")
    with open_tracker(tags={"odd": LONE_SURROGATE, "long": "y" * 6000}) as tracker:
        tracker.params({"odd": LONE_SURROGATE})
        tracker.artifact_text("config/resolved.yaml", "lr: 1.0e-6\n" + LONE_SURROGATE)
        tracker.artifact_json("result.json", {"nan": math.nan, "array": np.arange(3), 1: Path("x")})
        tracker.artifact_file(notes, "docs")
    run = stored(tracker)
    assert run.data.tags["odd"] == run.data.params["odd"] == "half a pair \\ud800 here"
    assert run.data.tags["long"] == "y" * 5000
    assert artifact(tracker, "tags/long.txt", tmp_path).read_text() == "y" * 6000
    assert artifact(tracker, "config/resolved.yaml", tmp_path).read_text() == "lr: 1.0e-6\nhalf a pair \\ud800 here"
    read_back = json.loads(artifact(tracker, "result.json", tmp_path).read_text())
    assert read_back == {"nan": None, "array": [0, 1, 2], "1": "x"}
    assert artifact(tracker, "docs/notes.md", tmp_path).read_text() == "# notes"
    assert not list((tracker.folder / "mlflow_spool").iterdir())


def test_the_environment_names_versions_and_commit(open_tracker, tmp_path):
    with open_tracker() as tracker:
        tracker.environment()
    found = json.loads(artifact(tracker, "environment.json", tmp_path).read_text())
    assert found == environment()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["mlflow"] is not None
    assert stored(tracker).data.tags.get("mlflow.source.git.commit") == found["git"]["commit"]


def test_a_record_that_is_refused_is_set_aside_and_the_next_one_goes_on(open_tracker):
    with open_tracker() as tracker:
        tracker.metrics({"reward": 1.0}, 0)
        tracker.artifact_file(Path("/no/such/file"))
        tracker.metrics({"reward": 2.0}, 1)
        assert tracker.flush()
    assert history(tracker, "reward") == [(0, 1.0), (1, 2.0)]
    assert tracker.num_refused == 1
    refused = json.loads((tracker.folder / "mlflow_buffer_refused.jsonl").read_text())
    assert refused["values"]["file"] == "/no/such/file"
    assert "error" in refused


def test_a_store_that_cannot_write_for_a_while_gets_everything_later(open_tracker):
    """A limit on the size of files stands for a full disk: the database can be read and not written."""
    tracker = open_tracker(retry_after_s=0.0)
    assert tracker.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        tracker.metrics({"reward": 1.0}, 1)
        assert not tracker.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [operation.step for operation in read_buffer(tracker.folder / BUFFER_NAME)[1]] == [1]
    tracker.metrics({"reward": 2.0}, 2)
    tracker.close()
    assert history(tracker, "reward") == [(1, 1.0), (2, 2.0)]
    assert tracker.num_refused == 0


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nonsense://x"])
def test_a_new_run_on_a_store_that_is_not_there_is_refused_with_advice(tmp_path, uri):
    with pytest.raises(TrackingError, match=r"tracking\.uri: .*local SQLite store"):
        Tracker.open(uri=uri, experiment="e", run_name="r", folder=tmp_path, tags={})


def test_a_resume_needs_no_store_and_loses_nothing(tmp_path):
    with Tracker.open(
        uri="http://127.0.0.1:9", experiment="e", run_name="r", folder=tmp_path, tags={}, run_id="abc"
    ) as tracker:
        tracker.metrics({"reward": 1.0}, 7)
    address, waiting = read_buffer(tmp_path / BUFFER_NAME)
    assert address == {"uri": "http://127.0.0.1:9", "run_id": "abc"}
    assert [operation.kind for operation in waiting] == ["resume", "metrics", "status"]
    assert waiting[1].values == {"reward": 1.0}
    assert waiting[1].step == 7
    assert replay(tmp_path) == 3


def test_what_waits_of_two_starts_of_a_run_has_files_of_its_own(tmp_path):
    """Also where both processes have the same number, as in a container."""
    for text in ("first", "second"):
        with Tracker.open(
            uri="http://127.0.0.1:9", experiment="e", run_name="r", folder=tmp_path, tags={}, run_id="abc"
        ) as tracker:
            tracker.artifact_text("note.txt", text)
    _, waiting = read_buffer(tmp_path / BUFFER_NAME)
    files = [Path(operation.values["file"]) for operation in waiting if operation.kind == "artifact"]
    assert [file.read_text() for file in files] == ["first", "second"]


@pytest.mark.processes
def test_a_lost_server_never_stops_a_run_and_gets_everything_when_it_is_back(runs_dir, tmp_path, port):
    open_client(default_uri(runs_dir))  # the tables are there already when the server starts
    with mlflow_server(runs_dir, port):
        tracker = Tracker.open(
            uri=f"http://127.0.0.1:{port}",
            experiment="served",
            run_name="r",
            folder=tmp_path / "run",
            tags={},
            retry_after_s=0.0,
        )
        tracker.metrics({"reward": 0.0}, 0)
        assert tracker.flush()
    for step in (1, 2):
        tracker.metrics({"reward": float(step)}, step)
    tracker.artifact_text("note.txt", "written while away")
    assert not tracker.flush()
    assert len(read_buffer(tracker.folder / BUFFER_NAME)[1]) == 3
    with mlflow_server(runs_dir, port):
        tracker.metrics({"reward": 3.0}, 3)
        assert tracker.flush()
        tracker.close()
        assert history(tracker, "reward") == [(step, float(step)) for step in range(4)]
        assert artifact(tracker, "note.txt", tmp_path).read_text() == "written while away"
        assert stored(tracker).info.status == "FINISHED"
    assert not (tracker.folder / BUFFER_NAME).exists()
    assert tracker.num_refused == 0
