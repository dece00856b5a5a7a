"""An experiment from its file to its table: what is written, tracked, reused, overridden, stopped and gone on with."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from hybrid.compare.load import load_runs
from hybrid.compare.summary import COSTS, summarise
from hybrid.errors import ConfigError, DataError
from hybrid.eval_command import evaluate_experiment
from hybrid.launch import train_experiment
from hybrid.mlflow_store import default_uri, open_client
from hybrid.read_config import read_experiment
from hybrid.records import read_records
from hybrid.sources import checkpoint_folder, whole_model
from hybrid.training import cut_records, last_checkpoint
from tests.experiments import QUICKSTART, ROOT, as_options, losses_of, small
from tests.integration.held import REWARDS, Hold

pytestmark = pytest.mark.xdist_group("experiments")
METHODS = ["opdvr", "grpo", "opd"]


@pytest.fixture(scope="module")
def started(tmp_path_factory, tiny_cache):
    """The quickstart in small: its folder of runs, its own folder, and what it printed."""
    runs = tmp_path_factory.mktemp("quickstart")
    config = read_experiment(QUICKSTART, small(runs))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = train_experiment(config, source=QUICKSTART)
    assert code == 0
    (folder,) = (runs / "quickstart").iterdir()
    return runs, folder, printed.getvalue()


@pytest.fixture(scope="module")
def children(started):
    """The MLflow runs of the trainings by method, with a client."""
    runs, folder, _ = started
    client = open_client(default_uri(runs))
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    parent = (folder / "mlflow_run").read_text()
    assert {run.info.run_id for run in found if "mlflow.parentRunId" not in run.data.tags} == {parent}
    below = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent]
    return client, {run.data.tags["hybrid.method"]: run for run in below}


def names_below(client, run_id, path=None):
    found = client.list_artifacts(run_id, path)
    return {file.path for file in found if not file.is_dir} | {
        name for file in found if file.is_dir for name in names_below(client, run_id, file.path)
    }


def test_it_ends_with_a_table_and_says_where_to_look(started):
    runs, folder, printed = started
    table = printed[printed.index("held-out accuracy in %") :]
    for word in [*METHODS, "avg@2", "pass@2", "->", f"report: {folder / 'report.html'}"]:
        assert word in table.replace("\n", "") or word in table
    assert f"MLflow: hybrid ui --folder {runs}" in table


def test_every_method_leaves_a_model_its_rollouts_and_its_result(started):
    _, folder, _ = started
    assert (folder / "report.html").stat().st_size > 100_000
    assert (folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_experiment(folder / "experiment.yaml").train.steps == 2
    for method in METHODS:
        assert (folder / method / "model" / "config.json").is_file()
        assert (folder / method / "model" / "tokenizer.json").is_file()
        result = orjson.loads((folder / method / "result.json").read_bytes())
        assert result["steps"] == 2
        assert set(result["after"]) >= {"eval/avg_at_2", "eval/pass_at_1", "eval/pass_at_2", "eval/truncated"}
        low, high = result["intervals_after"]["eval/avg_at_2"]
        assert low <= result["after"]["eval/avg_at_2"] <= high


def test_the_records_are_those_that_explain_reads(started):
    _, folder, _ = started
    lines = [orjson.loads(line) for line in (folder / "opdvr" / "rollouts.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0] * 4 + [1] * 4
    assert all(len(line["advantages"]) == len(line["token_ids"]) for line in lines)
    records = read_records(folder / "opdvr" / "rollouts.jsonl", step=1)
    assert len(records.token_ids) == 4


def test_all_methods_see_the_same_prompts_in_the_same_order(started):
    _, folder, _ = started
    seen = [
        [orjson.loads(line)["prompt"] for line in (folder / method / "rollouts.jsonl").read_bytes().splitlines()]
        for method in METHODS
    ]
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 4


def test_runs_stand_below_their_parent_with_tags_that_comparisons_read(started, children):
    _, folder, _ = started
    client, runs = children
    parent = client.get_run((folder / "mlflow_run").read_text())
    assert parent.data.tags["hybrid.kind"] == "parent"
    assert set(runs) == set(METHODS)
    for method, run in runs.items():
        assert run.info.status == "FINISHED"
        assert run.info.run_name == f"chain_sum {method} seed 0"
        wanted = {"hybrid.kind": "training", "hybrid.task": "chain_sum", "hybrid.seed": "0"}
        assert wanted.items() <= run.data.tags.items()
        assert run.data.params["method.name"] == method
        assert run.data.params["train.steps"] == "2"
        assert float(run.data.params["student.lr"]) == read_experiment(QUICKSTART).for_method(method).student.lr


def test_metrics_have_the_names_that_comparisons_read(children):
    client, runs = children
    for method, run in runs.items():
        names = set(run.data.metrics)
        costs = set(COSTS.values()) - {"step"}
        wanted = {"reward", "train/loss", "train/grad_norm", "response_length/mean", "time/step_s", "eval/avg_at_2"}
        assert wanted | costs <= names
        steps = [point.step for point in client.get_metric_history(run.info.run_id, "eval/avg_at_2")]
        assert steps == [0, 1, 2]
        assert run.data.metrics["rollouts/total"] == 8
        teacher = run.data.metrics["teacher_tokens/total"]
        assert (teacher > 0) == (method != "grpo")


def test_artifacts_hold_the_settings_the_environment_and_completions(children):
    client, runs = children
    for method, run in runs.items():
        names = names_below(client, run.info.run_id)
        wanted = {"experiment.yaml", "environment.json", "rollouts.jsonl", "completions/step_000000.json"}
        assert wanted <= names
        own = read_experiment(Path(client.download_artifacts(run.info.run_id, "experiment.yaml")))
        assert list(own.methods) == [method]
        table = orjson.loads(
            Path(client.download_artifacts(run.info.run_id, "completions/step_000001.json")).read_bytes()
        )
        assert {"prompt", "completion", "reward", "exact"} <= set(table["columns"])
        assert ("teacher_gap_per_token" in table["columns"]) == (method != "grpo")
        assert len(table["data"]) == 4


def test_the_runs_can_be_compared(started):
    runs, folder, _ = started
    found = load_runs(uri=default_uri(runs), experiment="quickstart", parent_run_id=(folder / "mlflow_run").read_text())
    summary = summarise(found, metric="eval/avg_at_2", baseline="grpo")
    assert {result.method for result in summary.results} == set(METHODS)
    assert {result.before.value for result in summary.results} == {summary.results[0].before.value}
    assert not any(result.num_failed for result in summary.results)


def test_a_second_start_reuses_the_models_and_overrides_what_it_is_told(started, tiny_cache, tmp_path, run_hybrid):
    made = {path: path.stat().st_mtime_ns for path in tiny_cache.glob("*/model.safetensors")}
    assert made
    changes = small(tmp_path, "method.name=opd", "seed=3", "train.steps=1", "compare=[]")
    code, out, _ = run_hybrid("train", QUICKSTART, *as_options(changes))
    assert code == 0
    assert "tiny student" not in out
    assert made == {path: path.stat().st_mtime_ns for path in tiny_cache.glob("*/model.safetensors")}
    (folder,) = (tmp_path / "quickstart").iterdir()
    assert [path.name for path in folder.iterdir() if (path / "result.json").is_file()] == ["opd"]
    own = read_experiment(folder / "experiment.yaml")
    assert (own.seed, list(own.methods), own.train.steps) == (3, ["opd"], 1)


def test_another_seed_sees_other_prompts_and_the_same_held_out_ones(started, tmp_path, tiny_cache):
    _, folder, _ = started
    config = read_experiment(QUICKSTART, small(tmp_path, "method.name=grpo", "compare=[]", "seed=1", "train.steps=1"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert train_experiment(config, source=QUICKSTART) == 0
    (other,) = (tmp_path / "quickstart").iterdir()
    mine = {orjson.loads(line)["prompt"] for line in (other / "grpo" / "rollouts.jsonl").read_bytes().splitlines()}
    theirs = {orjson.loads(line)["prompt"] for line in (folder / "grpo" / "rollouts.jsonl").read_bytes().splitlines()}
    assert not mine & theirs


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_losses_follow(tmp_path, tiny_cache):
    hold = Hold(tmp_path / "hold", 2)
    changes = [*small(tmp_path / "stopped", "compare=[]", "evaluate=null", REWARDS), "train.steps=16"]
    whole_changes = [*small(tmp_path / "whole", "compare=[]", "evaluate=null", REWARDS), "train.steps=16"]
    command = [sys.executable, "-m", "hybrid.cli", "train", str(QUICKSTART), *as_options(changes)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | hold.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        head = ""
        for line in process.stdout:
            head += line
            if line.startswith("opdvr: "):
                process.send_signal(signal.SIGINT)
                hold.let_go()
                break
        out, complaint = process.communicate(timeout=1500)
    assert process.returncode == 130, head + out + complaint
    assert "Traceback" not in complaint
    (folder,) = (tmp_path / "stopped" / "quickstart").iterdir()
    told = out.replace("\n", "")
    assert f"go on with: hybrid train {QUICKSTART} --resume {folder}".replace(" ", "") in told.replace(" ", "")
    checkpoint = last_checkpoint(folder / "opdvr")
    assert checkpoint is not None
    assert 1 <= int(checkpoint.rsplit("-", 1)[1]) < 16
    uri, run_id = default_uri(tmp_path / "stopped"), (folder / "opdvr" / "mlflow_run").read_text()
    assert open_client(uri).get_run(run_id).info.status == "KILLED"

    with contextlib.redirect_stdout(io.StringIO()):
        assert train_experiment(read_experiment(QUICKSTART, changes), source=QUICKSTART, resume=str(folder)) == 0
        assert train_experiment(read_experiment(QUICKSTART, whole_changes), source=QUICKSTART) == 0
    (whole,) = (tmp_path / "whole" / "quickstart").iterdir()
    unbroken = losses_of(default_uri(tmp_path / "whole"), (whole / "opdvr" / "mlflow_run").read_text())
    assert losses_of(uri, run_id) == unbroken
    assert len(unbroken) == 16
    assert open_client(uri).get_run(run_id).info.status == "FINISHED"
    steps = [orjson.loads(line)["step"] for line in (folder / "opdvr" / "rollouts.jsonl").read_bytes().splitlines()]
    assert steps == [step for step in range(16) for _ in range(4)]


def test_a_done_experiment_is_passed_over_when_it_is_resumed(started):
    runs, folder, _ = started
    before = {method: (folder / method / "result.json").stat().st_mtime_ns for method in METHODS}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train_experiment(read_experiment(QUICKSTART, small(runs)), source=QUICKSTART, resume="latest") == 0
    assert before == {method: (folder / method / "result.json").stat().st_mtime_ns for method in METHODS}
    assert "avg@2" in printed.getvalue()


@pytest.mark.parametrize("resume", ["latest", "nowhere"])
def test_there_must_be_something_to_resume(tmp_path, resume):
    config = read_experiment(QUICKSTART, small(tmp_path))
    with pytest.raises(ConfigError, match=r"no earlier start of quickstart|is no folder of an earlier start"):
        train_experiment(config, source=QUICKSTART, resume=resume)


def test_too_few_prompts_for_a_step_train_nothing_and_say_so(tmp_path):
    config = read_experiment(QUICKSTART, [*small(tmp_path), "data.limit=3", "train.prompts_per_step=4"])
    with pytest.raises(DataError, match=r"train.prompts_per_step: a step takes 4 prompts; the data has 3"):
        train_experiment(config, source=QUICKSTART)


def test_a_folder_without_a_model_is_no_checkpoint(started, tmp_path):
    _, folder, _ = started
    config = read_experiment(QUICKSTART, small(folder.parent.parent))
    before = sorted(folder.parent.iterdir())
    with pytest.raises(DataError, match=r"opdvr: holds no model \(neither .*; there is one in .*opdvr/model"):
        evaluate_experiment(config, source=QUICKSTART, checkpoint=str(folder / "opdvr"))
    with pytest.raises(DataError, match=r"./nowhere: there is no such folder"):
        evaluate_experiment(config, source=QUICKSTART, checkpoint="./nowhere")
    assert sorted(folder.parent.iterdir()) == before
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert checkpoint_folder(str(adapter)) == str(adapter)
    with pytest.raises(ConfigError, match=r"student.model: .*adapter holds a LoRA adapter; write it into its"):
        whole_model(str(adapter))
    assert whole_model(str(folder / "opdvr" / "model")) == str(folder / "opdvr" / "model")
    assert checkpoint_folder("gpt2") == "gpt2"  # a name on the hub
    assert checkpoint_folder(str(folder / "opdvr" / "model")) == str(folder / "opdvr" / "model")


def test_lines_of_a_log_are_whole_however_long(started):
    """What is no terminal has no width: a line that is cut could not be searched or copied."""
    _, folder, printed = started
    assert any(line.endswith(str(folder)) for line in printed.splitlines())
    assert f"report: {folder / 'report.html'}" in printed.splitlines()


def test_records_of_steps_that_come_again_are_cut_and_so_is_a_torn_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1}\n{"step":2}\n{"st')
    cut_records(path, str(tmp_path / "checkpoint-2"))
    assert path.read_bytes() == b'{"step":0}\n{"step":1}\n'
    cut_records(path, None)
    assert path.read_bytes() == b""
