"""A run that stands still ends by itself and says why: a frozen process, a teacher that does not answer."""

import asyncio
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from hybrid.checkpoints import newest_good, step_of
from hybrid.mlflow_store import default_uri, open_client
from hybrid.watchdog import STALLED, Sign, read, reason
from tests.experiments import QUICKSTART, as_options, recorded_steps, small
from tests.forks import Started
from tests.served import lives
from tests.teachers.fake_vllm import FakeVllm, stream

LIMIT_S = 15  # a run in good health, on a machine with much to do, gets on more often
ONE = ["compare=[]", "evaluate=null", "tracking.completions_every=0", f"engine.stall_after_s={LIMIT_S}"]
TWO = [*ONE, "engine.kind=ddp", "engine.processes=2", "train.steps=500", "train.save_every=1000"]


def sign(rank, part, turn, *, since=0.0, seen=100.0):
    return Sign(rank=rank, part=part, step=3, turn=turn, since=since, seen=seen, host="a", pid=7)


def test_the_reason_names_who_is_waited_for():
    late, waiting = sign(1, "rewards", 5, since=40.0), sign(0, "after rewards", 6, since=41.0)
    assert reason([waiting, late], 100.0, 50.0, {}) == (
        "process 1 is in 'rewards' of step 3 for 60 s; the others wait for it"
    )
    assert reason([late], 100.0, 50.0, {"rewards": "by a sandbox"}) == (
        "the run is in 'rewards' (by a sandbox) of step 3 for 60 s"
    )
    assert reason([waiting, sign(1, "after rewards", 6)], 100.0, 50.0, {}).startswith("all 2 processes are in")
    frozen = sign(1, "after rewards", 6, seen=30.0)
    assert "process 1 (pid 7 on a) has given no sign of life for 70 s" in reason([waiting, frozen], 100.0, 50.0, {})


def test_a_process_that_ends_while_the_others_are_read_is_left_out(tmp_path):
    (tmp_path / "0.json").write_bytes(orjson.dumps(asdict(sign(0, "rewards", 5))))
    (tmp_path / "1.json").symlink_to("gone")
    assert read(tmp_path) == [sign(0, "rewards", 5)]


def test_a_teacher_that_does_not_answer_is_named_with_its_address(forks, tmp_path):
    async def hangs(server, body):
        if recorded_steps(tmp_path):
            await asyncio.sleep(3600)
        events = [server.echo_event(body, index) for index in range(len(body["prompt"]))]
        return web.Response(text=stream(events), content_type="text/event-stream")

    server = FakeVllm().start()
    server.always = [hangs]
    teacher = f"teacher={{model: tiny, url: '{server.url}', requests: {{compress: false}}}}"
    run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *ONE, teacher)))
    assert run.ended() == STALLED, run.printed()
    server.stop()
    told = run.printed().replace("\n", "")
    assert f"the run is in 'teacher' (tiny at {server.url}) of step 2" in told
    (stacks,) = tmp_path.glob("quickstart/*/opdvr/stalled_0.txt")
    assert "teachers/vllm.py" in stacks.read_text()


def test_time_in_which_a_run_was_itself_stopped_does_not_count(forks, tmp_path):
    run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *ONE, "train.steps=30")))
    run.until(lambda: len(recorded_steps(tmp_path)) >= 2)
    run.kill(signal.SIGSTOP)
    time.sleep(LIMIT_S + 1)
    run.kill(signal.SIGCONT)
    assert run.ended() == 0, run.printed()


def test_a_rollout_engine_that_does_not_answer_is_named(forks, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run = forks.start(tmp_path, url, str(LIMIT_S), program="tests.integration.silent_rollouts:main")
        assert run.ended() == STALLED, run.printed()
    assert f"the run is in 'generation' (by the server at {url}) of step 1" in run.printed()
    assert "silent_rollouts.py" in (tmp_path / "stalled_0.txt").read_text()


def workers_of(launcher: Started) -> list[int]:
    """The processes that a launcher has started, by rank."""
    found = {}
    for pid in map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()):
        own = dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part)
        if "LOCAL_RANK" in own:
            found[int(own["LOCAL_RANK"])] = pid
    return [found[rank] for rank in range(2)]


@pytest.mark.processes
def test_a_launched_run_loses_a_process_is_stopped_loses_its_launcher_and_freezes(forks, tmp_path):
    def start(*more):
        before = len(recorded_steps(tmp_path))
        run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *TWO)), *more)
        run.until(lambda: len(recorded_steps(tmp_path)) >= before + 2)
        return run

    run = start()
    os.kill(workers_of(run)[1], signal.SIGKILL)
    assert run.ended() == 128 + signal.SIGKILL, run.printed()
    assert "process 1 was ended by signal 9; go on with --resume" in run.printed()
    assert "process 0 ends because another process of the run has ended" in run.printed()
    assert "Traceback" not in run.printed()

    run = start("--resume", "latest")
    (folder,) = tmp_path.glob("quickstart/*/opdvr")
    run.kill(signal.SIGTERM)
    assert run.ended() == 143, run.printed()
    first = newest_good(folder, pytest.fail)
    assert first is not None

    run = start("--resume", "latest")
    workers = workers_of(run)
    run.kill(signal.SIGKILL)
    assert run.ended() == -signal.SIGKILL
    while any(map(lives, workers)):  # they are told by nobody, find out, and save their step
        time.sleep(0.05)
    second = newest_good(folder, pytest.fail)
    assert second is not None
    assert step_of(second) > step_of(first)

    run = start("--resume", "latest")
    workers = workers_of(run)
    os.kill(workers[1], signal.SIGSTOP)
    assert run.ended() == STALLED, run.printed()
    assert not any(map(lives, workers))
    told = run.printed()
    assert f"process 0: no progress for {LIMIT_S} s: process 1 (pid {workers[1]} on" in told
    assert "has given no sign of life for" in told
    stacks = (folder / "stalled_0.txt").read_text()
    assert "in train_method" in stacks, "the stack of the main thread, wherever in a step it was waiting"
    tracked = open_client(default_uri(tmp_path)).get_run((folder / "mlflow_run").read_text())
    assert tracked.info.status == "FAILED"
    assert "process 1" in tracked.data.tags["hybrid.stalled"]
