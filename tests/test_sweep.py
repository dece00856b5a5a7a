"""A sweep: matched cells, killed and gone on with, failures counted; and which settings its cells have."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
from filelock import FileLock

from hybrid.compare.load import load_runs
from hybrid.errors import ConfigError
from hybrid.mlflow_store import open_client
from hybrid.per_method import set_dotted
from hybrid.stopping import Stop
from hybrid.sweep import (
    FAILED_FILE,
    MADE_OF_FILE,
    RUNNING,
    first_difference,
    refuse_other_settings,
    run_sweep,
    state_of,
    sweep_folder,
    take,
)
from hybrid.sweep_config import labels_of, read_sweep, too_few_seeds
from hybrid.training import RESULT_FILE, last_checkpoint
from hybrid.workers import cores, worker_environments
from hybrid.yaml_file import dump_yaml
from tests.experiments import QUICKSTART, ROOT, SMALL, as_options

pytestmark = pytest.mark.xdist_group("experiments")
GRID = {
    "base": str(QUICKSTART),
    "name": "grid",
    "seeds": [4, 7],
    "methods": [{"name": "grpo"}, {"name": "opd"}],
    "tasks": {"sums": {}, "lost": {"data.source": "nowhere.jsonl"}},
    "only": {"grpo": ["sums"]},
    "settings": {key: int(value) for key, _, value in (change.partition("=") for change in SMALL)},
}
WITHOUT_TASKS = {"tasks": {}, "only": {}}


def written(folder, **changes):
    """The grid as a file in a folder, with other values of its keys; its cells write below the same folder."""
    values = GRID | changes
    values["settings"] = values["settings"] | {"tracking.folder": str(folder / "runs")}
    path = folder / "grid.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    return path


def wait_for(path, process, limit_s=900):
    """Waits until a file is there; what the process says is the message if it is not."""
    until = time.monotonic() + limit_s
    while not path.is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tiny_cache):
    """A grid whose processes were killed after the first cell, and the time at which that was done."""
    folder = tmp_path_factory.mktemp("sweep")
    path = written(folder)
    first = folder / "runs" / "grid" / "sums" / "grpo" / "seed4" / RESULT_FILE
    command = [sys.executable, "-m", "hybrid.cli", "sweep", str(path), "--jobs", "1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        wait_for(first, process)
        os.killpg(process.pid, signal.SIGKILL)
    return path, folder / "runs" / "grid", first.stat().st_mtime_ns


@pytest.fixture(scope="module")
def gone_on(killed):
    """The same grid after a second start in two processes: exit code, cells by name, and the folder."""
    path, folder, _ = killed
    code = run_sweep(path, jobs=2)
    _, cells = read_sweep(path)
    return code, {cell.name: cell for cell in cells}, folder


def test_a_second_start_does_what_is_missing_and_nothing_twice(killed, gone_on):
    _, _, done_at = killed
    _, cells, folder = gone_on
    assert (folder / "sums" / "grpo" / "seed4" / RESULT_FILE).stat().st_mtime_ns == done_at
    for name in cells:
        assert (folder / name / RESULT_FILE).is_file() == name.startswith("sums/")
    steps = {
        name: [orjson.loads(line)["step"] for line in (folder / name / "rollouts.jsonl").read_bytes().splitlines()]
        for name in cells
        if name.startswith("sums/")
    }
    assert all(found == [0] * 4 + [1] * 4 for found in steps.values()), steps


def test_a_failing_cell_is_counted_and_stops_no_other(gone_on):
    code, cells, folder = gone_on
    assert code == 1
    states = {name: state_of(cell, folder).name for name, cell in cells.items()}
    assert states == {
        "sums/grpo/seed4": "done",
        "sums/opd/seed4": "done",
        "lost/opd/seed4": "failed",
        "sums/grpo/seed7": "done",
        "sums/opd/seed7": "done",
        "lost/opd/seed7": "failed",
    }
    assert "nowhere.jsonl" in (folder / "lost" / "opd" / "seed4" / FAILED_FILE).read_text()


def test_a_signal_ends_the_workers_too_and_leaves_nothing_half_said(tmp_path, tiny_cache):
    path = written(tmp_path, seeds=[4], methods=[{"name": "opd"}], **WITHOUT_TASKS)
    long = ["settings.train.steps=100000", "settings.evaluate.every=0"]
    command = [sys.executable, "-m", "hybrid.cli", "sweep", str(path), "--jobs", "1", *as_options(long)]
    folder = tmp_path / "runs" / "grid"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for(folder / "opd" / "seed4" / "rollouts.jsonl", process)
        process.send_signal(signal.SIGTERM)  # to it alone, as a container or a batch system does
        said, _ = process.communicate()
    assert process.returncode == 143, said
    assert "the same command goes on" in said
    _, cells = read_sweep(path, long)
    assert state_of(cells[0], folder).name == "waiting"  # nobody holds its lock any more
    assert last_checkpoint(folder / "opd" / "seed4") is not None
    client = open_client((folder / "mlflow_uri").read_text())
    ended = [client.get_run((place / "mlflow_run").read_text()) for place in (folder, folder / "opd" / "seed4")]
    assert [run.info.status for run in ended] == ["KILLED", "KILLED"]
    described = [run.data.tags["mlflow.note.content"] for run in ended]
    assert described[0] == "grid.yaml: 1 method, 1 matched seed; 1 training."
    assert described[1].startswith(
        "opd on its prompts, seed 4: tiny:chain_sum, 100000 steps of 2 prompts with 2 responses"
    )
    assert described[1].endswith(", taught by tiny:chain_sum.")


@pytest.mark.parametrize(
    ("jobs", "missing", "visible", "count", "expected"),
    [
        (None, 9, None, 2, ["0", "1"]),
        (None, 1, None, 2, ["0"]),
        (4, 9, None, 2, ["0", "1", "0", "1"]),
        (None, 9, "3, 5,7", 3, ["3", "5", "7"]),
        (None, 9, "GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
        (3, 9, None, 0, [None] * 3),
        (3, 0, None, 0, []),
    ],
)
def test_each_worker_has_a_gpu_of_its_own_where_there_are_any(jobs, missing, visible, count, expected):
    given = {"PATH": "/bin"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    found = worker_environments(jobs, missing, given, count)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in found] == expected
    assert all(one["OMP_NUM_THREADS"] == "1" and one["PATH"] == "/bin" for one in found)


def test_without_a_gpu_there_is_a_worker_per_core():
    assert len(worker_environments(None, 1000, {"OMP_NUM_THREADS": "2"}, 0)) == cores()


def test_a_look_at_a_cell_is_not_taken_for_a_worker(gone_on):
    _, cells, folder = gone_on
    cell, stop = cells["lost/opd/seed4"], Stop(print)
    assert not take(cell, folder, stop), "a failed cell is tried again by the next start alone"
    (folder / cell.name / FAILED_FILE).unlink()
    with ThreadPoolExecutor(1) as worker:
        with FileLock(folder / cell.name / RUNNING):
            taken = worker.submit(take, cell, folder, stop)
            assert state_of(cell, folder).name == "running"
        assert taken.result()
    assert state_of(cell, folder).name == "failed"


def test_methods_of_a_seed_see_the_same_prompts_in_the_same_order(gone_on):
    _, _, folder = gone_on

    def seen(method, seed):
        lines = (folder / "sums" / method / f"seed{seed}" / "rollouts.jsonl").read_bytes().splitlines()
        return [orjson.loads(line)["prompt"] for line in lines]

    assert seen("grpo", 4) == seen("opd", 4)
    assert seen("grpo", 7) == seen("opd", 7)
    assert seen("grpo", 4) != seen("grpo", 7)
    before = {
        (method, seed): orjson.loads((folder / "sums" / method / f"seed{seed}" / RESULT_FILE).read_bytes())["before"]
        for method in ("grpo", "opd")
        for seed in (4, 7)
    }
    assert before["grpo", 4] == before["opd", 4]
    assert before["grpo", 7] == before["opd", 7]


def test_runs_stand_below_one_parent_and_failures_among_them(gone_on):
    _, _, folder = gone_on
    parent = (folder / "mlflow_run").read_text()
    uri = (folder / "mlflow_uri").read_text()
    runs = load_runs(uri=uri, experiment="grid", parent_run_id=parent)
    status = {(run.task, run.method, run.seed): run.status for run in runs}
    assert status == {
        **{("sums", method, seed): "FINISHED" for method in ("grpo", "opd") for seed in (4, 7)},
        **{("lost", "opd", seed): "FAILED" for seed in (4, 7)},
    }


def test_a_cell_that_failed_is_tried_once_a_start(tmp_path):
    sweep, (cell,) = read_sweep(written(tmp_path, seeds=[4], methods=[{"name": "opd"}], **WITHOUT_TASKS))
    folder = sweep_folder(sweep, [cell])
    (folder / cell.name).mkdir(parents=True)
    (folder / cell.name / FAILED_FILE).write_text("in another worker")
    with Stop(print) as stop:
        assert take(cell, folder, stop) is False


def test_the_comparison_is_written_and_counts_what_failed(gone_on):
    _, _, folder = gone_on
    assert (folder / "report.html").stat().st_size > 100_000
    assert (folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    found = orjson.loads((folder / "comparison.json").read_bytes())
    assert found["baseline"] == "grpo"
    counted = {(one["task"], one["method"]): (one["num_runs"], one["num_failed"]) for one in found["results"]}
    assert counted["sums", "opd"] == (2, 0)
    assert counted["lost", "opd"] == (2, 2)


def test_cells_of_other_settings_are_refused_by_name(killed, gone_on):
    path, folder, _ = killed
    _, cells = read_sweep(path, ["settings.student.lr=0.5"])
    with pytest.raises(ConfigError, match=r"was run with student\.lr = 0\.\d+, and the sweep now has 0\.5"):
        refuse_other_settings(cells, folder)
    _, cells = read_sweep(path, ["settings.tracking.note=a word"])
    refuse_other_settings(cells, folder)
    models = orjson.loads((folder / "sums" / "opd" / "seed4" / MADE_OF_FILE).read_bytes())["embedded_models"]
    assert [name.split("-")[:3] for name in models] == [
        ["tiny", "chain_sum", "student"],
        ["tiny", "chain_sum", "teacher"],
    ]


def test_the_first_difference_has_a_dotted_name():
    assert first_difference({"settings": {"a": {"b": 1}}}, {"settings": {"a": {"b": 2}}}) == ("a.b", 1, 2)
    assert first_difference({"x": [1]}, {"x": [1], "y": 2}) == ("y", None, 2)


def test_seeds_are_outermost_and_a_method_may_keep_to_some_tasks(tmp_path):
    _, cells = read_sweep(written(tmp_path))
    assert [cell.name for cell in cells] == [
        "sums/grpo/seed4",
        "sums/opd/seed4",
        "lost/opd/seed4",
        "sums/grpo/seed7",
        "sums/opd/seed7",
        "lost/opd/seed7",
    ]
    assert {cell.config.seed for cell in cells} == {4, 7}
    assert {cell.config.train.steps for cell in cells} == {2}
    assert all(list(cell.config.methods) == [cell.label] for cell in cells)


def test_a_number_of_seeds_counts_from_zero(tmp_path):
    _, cells = read_sweep(written(tmp_path, seeds=3, **WITHOUT_TASKS))
    assert [cell.name for cell in cells][:3] == ["grpo/seed0", "opd/seed0", "grpo/seed1"]
    assert len(cells) == 6


def test_without_methods_those_of_the_experiment_run(tmp_path):
    _, cells = read_sweep(written(tmp_path, methods=[], seeds=1, **WITHOUT_TASKS))
    assert [cell.label for cell in cells] == ["opdvr", "grpo", "opd"]


def test_what_varies_is_in_the_label_and_in_the_settings(tmp_path):
    vary = {"student.lr": [0.1, 0.2], "method.coef": [1.0, 2.0]}
    _, cells = read_sweep(written(tmp_path, methods=[{"name": "grpo_opd"}], seeds=1, vary=vary, **WITHOUT_TASKS))
    settings = {cell.label: (cell.config.student.lr, dict(cell.config.method)["coef"]) for cell in cells}
    assert settings == {
        "grpo_opd_lr=0.1_coef=1.0": (0.1, 1.0),
        "grpo_opd_lr=0.1_coef=2.0": (0.1, 2.0),
        "grpo_opd_lr=0.2_coef=1.0": (0.2, 1.0),
        "grpo_opd_lr=0.2_coef=2.0": (0.2, 2.0),
    }


def test_the_study_has_a_cell_for_every_task_method_and_seed():
    sweep, cells = read_sweep(ROOT / "experiments" / "study.yaml")
    tasks, labels = {cell.task for cell in cells}, {cell.label for cell in cells}
    assert tasks == {"chain_sum", "carry_sum", "long_sum"}
    assert sweep.baseline in labels
    assert len(labels) == 13
    assert {cell.seed for cell in cells} == set(range(9))
    assert len({cell.name for cell in cells}) == len(cells) == 351
    assert too_few_seeds(cells) is None
    assert "needs 9" in str(too_few_seeds([cell for cell in cells if cell.seed < 8]))


def test_a_block_of_settings_merges_and_one_that_says_what_it_is_takes_the_place():
    values = {"train": {"steps": 1, "top_p": 0.5}, "data": {"source": {"task": "a", "params": {"x": 1}}}}
    before = str(values)
    changed = dict(values)
    set_dotted(changed, "train", {"steps": 2})
    set_dotted(changed, "train.trl", {"beta": 0.0})
    set_dotted(changed, "data.source", {"task": "b"})
    set_dotted(changed, "evaluate.data", {"split": "eval"})
    assert changed == {
        "train": {"steps": 2, "top_p": 0.5, "trl": {"beta": 0.0}},
        "data": {"source": {"task": "b"}},
        "evaluate": {"data": {"split": "eval"}},
    }
    assert str(values) == before


def test_a_label_is_never_given_twice():
    assert labels_of([{"name": "opd"}, {"name": "opd", "label": "opd_3"}, {"name": "opd"}, {"name": "opd"}]) == [
        "opd",
        "opd_3",
        "opd_2",
        "opd_4",
    ]
    # a label that somebody gave is theirs, for per_method and only speak of it
    assert labels_of([{"name": "opd"}, {"name": "opd"}, {"name": "kat", "label": "opd_2"}]) == ["opd", "opd_3", "opd_2"]
    assert labels_of([{"label": "a"}, {"label": "a"}, {"label": "a_2"}]) == ["a", "a_3", "a_2"]


def test_labels_are_given_or_numbered():
    methods = [{"name": "kat"}, {"name": "kat", "window": 3}, {"name": "kat", "label": "short"}, {"name": "kat"}]
    assert labels_of(methods) == ["kat", "kat_2", "short", "kat_3"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seeds": []}, "the sweep has no cell"),
        ({"seeds": [1, -1]}, r"grid\.yaml:\d+: seeds.*: .*greater than or equal to 0"),
        ({"methods": [{"name": "gpro"}]}, "cell sums gpro seed 4: .*gpro"),
        ({"tasks": {"a": {"train.stepz": 3}}}, r"cell a opd seed 4: .*train\.stepz: unknown key; did you mean steps"),
        ({"seeds": [4, 4]}, "the cell sums/grpo/seed4 comes twice; give every seed and every value of vary once"),
        ({"vary": {"student.lr": [0.1, 0.1]}}, "the cell sums/grpo_lr=0.1/seed4 comes twice"),
        ({"vary": {"student.lr": [0.1]}, "baseline": "grpo"}, r"baseline: .* there are grpo_lr=0\.1, opd_lr=0\.1"),
        ({"only": {"grpo": ["smus"]}}, r"only\.grpo: there is no task of this name; did you mean sums\?"),
        (
            {"tasks": {"sums": {"engine.kind": "ddp"}}},
            "cell sums grpo seed 4: engine.kind: a cell of a sweep is one process",
        ),
        ({"target": 50}, r"grid\.yaml:\d+: target: .*less than or equal to 1"),
        ({"jobs": 0}, r"grid\.yaml:\d+: jobs: "),
        ({"name": "a/b"}, r"grid\.yaml:\d+: name: "),
        ({"seed": 3}, "seed: unknown key; did you mean seeds"),
    ],
)
def test_an_error_names_its_cell_or_its_key(tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_sweep(written(tmp_path, **changes))
