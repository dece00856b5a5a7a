"""What happens to a long run: signals, killed processes, full disks, folders that cannot be written, a lost server."""

import re
import resource
import signal
from pathlib import Path

import orjson
import pytest

from hybrid.checkpoints import best_checkpoint, best_value, checkpoints, newest_good, step_of
from hybrid.mlflow_store import default_uri, open_client
from hybrid.tracking import BUFFER_NAME
from tests.experiments import QUICKSTART, as_options, recorded_steps, small
from tests.integration.held import REWARDS, Hold
from tests.mlflow_server import mlflow_server

STEPS = 16
ONE = ["compare=[]", "evaluate=null", "tracking.completions_every=0"]
LONG = [*ONE, f"train.steps={STEPS}", "train.save_every=5", "tracking.completions_every=3"]
ENGINES = {
    "single": [],
    "ddp": ["engine.kind=ddp", "engine.processes=2"],
    "zero3": ["engine.kind=deepspeed", "engine.processes=2", "engine.stage=3"],
}
CLOCKS = r"step_time|time/.*|memory/.*|train_.*|total_flos"
"""What a clock or the machine says."""


def log_of(folder: Path) -> list[dict[str, float]]:
    """What the trainer logged in all steps, to the last digit."""
    state = orjson.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_bytes())
    return [{k: v for k, v in entry.items() if not re.fullmatch(CLOCKS, k)} for entry in state["log_history"]]


def run_of(runs: Path, folder: Path):
    client = open_client(default_uri(runs))
    return client, client.get_run((folder / "mlflow_run").read_text())


def points_of(runs: Path, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric of the training in MLflow."""
    client, run = run_of(runs, folder)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(point.step, point.value) for point in history] for name, history in histories.items()}


def arrived(runs: Path, step: int) -> bool:
    """Whether MLflow has the loss of an update."""
    (folder,) = runs.glob("quickstart/*/opdvr")
    return step in dict(points_of(runs, folder).get("train/loss", []))


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_goes_on_after_sigterm_and_sigkill_as_if_nothing_had_been(forks, tmp_path, engine):
    processes = 1 if engine == "single" else 2

    def start(runs, *more, changes=(), hold=None):
        options = as_options(small(runs, *LONG, REWARDS, *ENGINES[engine], *changes))
        one_or_two = forks.pair if processes == 2 else lambda *words, **more: (forks.start(*words, **more),)
        return one_or_two("train", QUICKSTART, *options, *more, **({} if hold is None else hold.environment))

    broken, hold = tmp_path / "broken", Hold(tmp_path / "hold", 2)
    run = start(broken, hold=hold)
    run[0].until(lambda: len(recorded_steps(broken)) == hold.step)
    run[-1].kill(signal.SIGTERM)  # one of them: all stop together
    hold.let_go()
    assert [process.ended() for process in run] == [143] * processes, run[0].printed()
    assert "go on with: hybrid train" in run[0].printed().replace("\n", " ")
    (folder,) = broken.glob("quickstart/*/opdvr")
    assert newest_good(folder, print) is not None

    hold = Hold(tmp_path / "hold", 8)
    run = start(broken, "--resume", "latest", changes=["train.save_keep=3"], hold=hold)
    run[0].until(lambda: len(recorded_steps(broken)) == hold.step and arrived(broken, 5))  # what the checkpoint is of
    for process in run:
        process.kill(signal.SIGKILL)
    assert [process.ended() for process in run] == [-signal.SIGKILL] * processes

    done, whole = start(broken, "--resume", "latest"), start(tmp_path / "whole")
    assert [process.ended() for process in (*done, *whole)] == [0] * 2 * processes, done[0].printed()
    (other,) = (tmp_path / "whole").glob("quickstart/*/opdvr")
    assert log_of(folder) == log_of(other)
    assert recorded_steps(broken) == list(range(STEPS))

    points, unbroken = points_of(broken, folder), points_of(tmp_path / "whole", other)
    assert points.keys() == unbroken.keys()
    for name, values in points.items():
        assert [step for step, _ in values] == [step for step, _ in unbroken[name]], name
        assert re.fullmatch(CLOCKS, name) or values == unbroken[name], name
    assert [step for step, _ in points["train/loss"]] == list(range(1, STEPS + 1))
    client, mlflow_run = run_of(broken, folder)
    assert mlflow_run.info.status == "FINISHED"
    tags = {name: value for name, value in mlflow_run.data.tags.items() if name.startswith("resume/")}
    assert tags == {"resume/1/train.save_keep": "3"}
    tables = {Path(file.path).name for file in client.list_artifacts(mlflow_run.info.run_id, "completions")}
    assert tables == {f"step_{step:06d}.json" for step in range(0, STEPS, 3)}
    for table in tables:
        path = client.download_artifacts(mlflow_run.info.run_id, f"completions/{table}", str(tmp_path))
        assert len(orjson.loads(Path(path).read_bytes())["data"]) == 4, "a step that came again is in it once"


def test_a_disk_that_takes_no_rollouts_ends_the_run_with_advice(forks, tmp_path):
    folder = tmp_path / "quickstart" / "full"
    (folder / "opdvr").mkdir(parents=True)
    (folder / "experiment.yaml").touch()
    (folder / "opdvr" / "rollouts.jsonl").symlink_to("/dev/full")
    run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *ONE)), "--resume", folder)
    assert run.ended() == 2
    told = run.printed().replace("\n", " ")
    assert f"the rollouts could not be written to {folder}/opdvr/rollouts.jsonl (No space left on device)" in told
    assert "Traceback" not in told


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_and_loses_no_point(forks, tmp_path):
    """A limit on the size of files stands for a full disk; it meets the checkpoint and the tracking's database."""
    options, hold = as_options(small(tmp_path, *LONG, REWARDS)), Hold(tmp_path / "hold", 6)
    run = forks.start("train", QUICKSTART, *options, **hold.environment)
    run.until(lambda: len(recorded_steps(tmp_path)) == hold.step)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    hold.let_go()
    assert run.ended() == 2, run.printed()
    (folder,) = tmp_path.glob("quickstart/*/opdvr")
    stands = newest_good(folder, pytest.fail)
    assert stands is not None
    told = run.printed().replace("\n", " ")
    assert re.search(rf"checkpoint-\d+ could not be written to .*; {stands.name} stands; make room", told), told
    assert "Traceback" not in told
    assert forks.start("train", QUICKSTART, *options, "--resume", "latest").ended() == 0
    assert [step for step, _ in points_of(tmp_path, folder)["train/loss"]] == list(range(1, STEPS + 1))
    assert recorded_steps(tmp_path) == list(range(STEPS))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_folder_that_cannot_be_written_is_told_at_once(forks, tmp_path, resumed):
    folder = tmp_path / "quickstart" / "earlier"
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").touch()
    (folder / "experiment.yaml").chmod(0o400)
    for path in (folder, folder.parent):
        path.chmod(0o500)
    more = ["--resume", folder] if resumed else []
    run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *ONE)), *more, powerless=True)
    assert run.ended() == 2, run.printed()
    told = run.printed().replace("\n", " ")
    assert f"could not write {folder}/experiment.yaml" in told if resumed else "set tracking.folder to one that" in told
    assert "Permission denied" in told
    assert "Traceback" not in told


@pytest.mark.processes
def test_a_run_ends_well_without_its_mlflow_server_and_the_server_gets_everything_later(forks, tmp_path, port):
    open_client(default_uri(tmp_path))  # the tables are there already when the server starts
    changes = ["compare=[]", f"tracking.uri=http://127.0.0.1:{port}", "train.steps=8", "evaluate.every=4"]
    options, hold = as_options(small(tmp_path, *changes, REWARDS)), Hold(tmp_path / "hold", 2)
    with mlflow_server(tmp_path, port):
        run = forks.start("train", QUICKSTART, *options, **hold.environment)
        run.until(lambda: len(recorded_steps(tmp_path)) == hold.step)
    hold.let_go()
    assert run.ended() == 0, run.printed()
    (folder,) = tmp_path.glob("quickstart/*/opdvr")
    assert "--resume sends them and writes the report" in run.printed().replace("\n", " ")
    assert (folder / "tracking" / BUFFER_NAME).exists()
    with mlflow_server(tmp_path, port):
        again = forks.start("train", QUICKSTART, *options, "--resume", "latest")
        assert again.ended() == 0, again.printed()
    assert not (folder / "tracking" / BUFFER_NAME).exists()
    assert (folder.parent / "report.html").is_file()
    points = points_of(tmp_path, folder)
    assert [step for step, _ in points["train/loss"]] == list(range(1, 9))
    assert [step for step, _ in points["eval/avg_at_2"]] == [0, 4, 8]
    assert run_of(tmp_path, folder)[1].info.status == "FINISHED"


def test_a_run_goes_back_to_its_best_checkpoint_with_other_settings(forks, tmp_path):
    changes = ["compare=[]", "train.steps=9", "train.save_every=3", "evaluate.every=3", "evaluate.prompts=8"]
    options, hold = as_options(small(tmp_path, *changes, REWARDS)), Hold(tmp_path / "hold", 8)
    run = forks.start("train", QUICKSTART, *options, **hold.environment)
    run.until(lambda: len(recorded_steps(tmp_path)) == hold.step and arrived(tmp_path, hold.step))
    run.kill()
    assert run.ended() == -signal.SIGKILL
    (folder,) = tmp_path.glob("quickstart/*/opdvr")
    best, value, before = best_checkpoint(folder), best_value(folder), points_of(tmp_path, folder)
    assert best is not None
    assert value == max(value for step, value in before["eval/avg_at_2"] if step)

    judged = forks.start("eval", QUICKSTART, *options, "--checkpoint", folder / "best")
    assert judged.ended() == 0, judged.printed()
    (result,) = tmp_path.glob("quickstart/*/evaluation.json")
    assert orjson.loads(result.read_bytes())["eval/avg_at_2"] == value

    back = ["--resume", folder.parent, "--from-best", *as_options(["student.lr=2e-3"])]
    again = forks.start("train", QUICKSTART, *options, *back)
    assert again.ended() == 0, again.printed()
    assert f"back to its best checkpoint, {best.name}" in again.printed()
    after, step = points_of(tmp_path, folder), step_of(best)
    assert [point[0] for point in after["train/loss"]] == list(range(1, 10))
    for name, values in before.items():
        assert [point for point in after[name] if point[0] <= step] == [point for point in values if point[0] <= step]
    same, later = (dict(points["train/loss"]) for points in (before, after))
    assert same[step + 1] == later[step + 1], "the same weights and prompts; the new learning rate moves the next step"
    assert recorded_steps(tmp_path) == list(range(9))
    client, branch = run_of(tmp_path, folder)
    earlier = client.get_run(branch.data.tags["hybrid.from_run"])
    assert branch.data.tags["hybrid.from_step"] == str(step)
    assert branch.data.params["student.lr"] == "0.002"
    assert (earlier.data.params["student.lr"], earlier.info.status) == ("0.001", "KILLED")
    assert checkpoints(folder)[-1].name == "checkpoint-9"
