"""What happens to a long run: signals, killed processes, full disks, folders that cannot be written, a lost server."""

import re
import signal
from pathlib import Path

import orjson
import pytest

from hybrid.checkpoints import newest_good
from hybrid.mlflow_store import default_uri, open_client
from tests.experiments import QUICKSTART, as_options, recorded_steps, small

STEPS = 16
ONE = ["compare=[]", "evaluate=null", "tracking.completions_every=0"]
LONG = [*ONE, f"train.steps={STEPS}", "train.save_every=5", "tracking.completions_every=3"]
TWO = ["engine.kind=ddp", "engine.processes=2"]
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


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_after_sigterm_and_sigkill_as_if_nothing_had_been(forks, tmp_path, processes):
    def start(runs, *more, changes=()):
        settings = small(runs, *LONG, *(TWO if processes == 2 else []), *changes)
        return (
            forks.pair("train", QUICKSTART, *as_options(settings), *more)
            if processes == 2
            else (forks.start("train", QUICKSTART, *as_options(settings), *more),)
        )

    broken = tmp_path / "broken"
    run = start(broken)
    run[0].until(lambda: len(recorded_steps(broken)) >= 2)
    run[-1].kill(signal.SIGTERM)  # one of them: all stop together
    assert [process.ended() for process in run] == [143] * processes, run[0].printed()
    assert "go on with: hybrid train" in run[0].printed().replace("\n", " ")
    (folder,) = broken.glob("quickstart/*/opdvr")
    assert newest_good(folder, print) is not None

    run = start(broken, "--resume", "latest", changes=["train.save_keep=3"])
    run[0].until(lambda: len(recorded_steps(broken)) >= 8)
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
