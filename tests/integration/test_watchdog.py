"""A run that stands still ends by itself and says why: a frozen process, a teacher that does not answer."""

import asyncio
import signal
import socket

import pytest

from hybrid.mlflow_store import default_uri, open_client
from hybrid.watchdog import STALLED, Sign, reason
from tests.experiments import QUICKSTART, as_options, recorded_steps, small
from tests.teachers.fake_vllm import FakeVllm

LIMIT_S = 6
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


@pytest.mark.processes
def test_a_frozen_process_is_found_by_the_other_one_and_named(forks, tmp_path):
    first, second = forks.pair("train", QUICKSTART, *as_options(small(tmp_path, *TWO)))
    first.until(lambda: len(recorded_steps(tmp_path)) >= 3)
    second.kill(signal.SIGSTOP)
    assert first.ended() == STALLED, first.printed()
    assert second.ended() == -signal.SIGKILL
    told = first.printed()
    assert f"process 0: no progress for {LIMIT_S} s: process 1 (pid {second.pid} on" in told
    assert "has given no sign of life for" in told
    (folder,) = tmp_path.glob("quickstart/*/opdvr")
    stacks = (folder / "stalled_0.txt").read_text()
    assert "training_step" in stacks, "the stack of the main thread"
    run = open_client(default_uri(tmp_path)).get_run((folder / "mlflow_run").read_text())
    assert run.info.status == "FAILED"
    assert "process 1" in run.data.tags["hybrid.stalled"]


@pytest.fixture
def silent_teacher():
    """Answers three times, and then keeps everybody waiting."""
    server = FakeVllm()

    async def answers(server, body):
        return None

    async def hangs(server, body):
        await asyncio.sleep(3600)

    server.faults = [answers, answers, answers, *[hangs] * 1000]
    yield server.start()
    server.stop()


def test_a_teacher_that_does_not_answer_is_named_with_its_address(forks, tmp_path, silent_teacher):
    teacher = f"teacher={{model: tiny, url: '{silent_teacher.url}'}}"
    run = forks.start("train", QUICKSTART, *as_options(small(tmp_path, *ONE, teacher)))
    assert run.ended() == STALLED, run.printed()
    told = run.printed().replace("\n", "")
    assert f"the run is in 'teacher' (tiny at {silent_teacher.url}) of step" in told
    (stacks,) = tmp_path.glob("quickstart/*/opdvr/stalled_0.txt")
    assert "teachers/vllm.py" in stacks.read_text()


def test_a_rollout_engine_that_does_not_answer_is_named(forks, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run = forks.start(tmp_path, url, "2", program="tests.integration.silent_rollouts:main")
        assert run.ended() == STALLED, run.printed()
    assert f"the run is in 'generation' (by the server at {url}) of step 1" in run.printed()
    assert "silent_rollouts.py" in (tmp_path / "stalled_0.txt").read_text()
