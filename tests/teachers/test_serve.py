"""The command that serves a teacher, and that no server outlives the run it was started for.

A small script stands in for vLLM where only its life matters; `test_vllm_live.py` starts the real one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from teachers import keeper
from teachers.errors import TeacherError, TeacherUnavailable
from teachers.serve import (
    KEY_ENV,
    PYTHON_ENV,
    ServeConfig,
    serve,
    server_command,
    server_environment,
    vllm_python,
    vllm_version,
)
from tests.served import ROOT, all_gone

# a parent with a child, as vLLM has its engine; both ignore SIGTERM where told to
TREE = """
import os, signal, subprocess, sys, time
if sys.argv[2:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "parent":
    child = subprocess.Popen([sys.executable, "-c", open(__file__).read(), "child", *sys.argv[2:]])
    print(os.getpid(), child.pid, flush=True)
time.sleep(120)
"""
OWNER = """
import os, subprocess, sys, time
script, folder, *command = sys.argv[1:]
command = [sys.executable, "-I", script, folder, str(os.getpid()), *command]
kept = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(120)
"""


@pytest.fixture
def tree(tmp_path):
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    return [sys.executable, str(script), "parent"]


def command(device, **settings):
    config = ServeConfig(model="org/model", device=device, **settings)
    return server_command(config, port=8123, python="/v/bin/python", version=(0, 32, 0))


def test_the_command_on_a_gpu():
    assert command("cuda", max_model_len=4096, max_logprobs=64, gpus="6,7", flags=("--seed", "3")) == [
        *("/v/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"),
        *("--host", "127.0.0.1", "--port", "8123", "--dtype", "auto", "--max-logprobs", "64"),
        *("--max-model-len", "4096", "--tensor-parallel-size", "2", "--enable-scale-out", "--seed", "3"),
    ]


def test_the_command_on_a_cpu():
    assert command("cpu", served_name="teacher", compress=True) == [
        *("/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", "8123", "--dtype", "float32", "--max-logprobs", "20"),
        *("--served-model-name", "teacher", "--enable-scale-out"),
        *("--middleware", "starlette.middleware.gzip.GZipMiddleware"),
    ]


def test_an_older_vllm_is_not_given_a_flag_that_it_does_not_know():
    config = ServeConfig(model="m", device="cpu")
    assert "--enable-scale-out" not in server_command(config, port=1, python="p", version=(0, 20, 1))


def test_the_server_gets_the_key_and_not_the_ranks_of_the_training(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(KEY_ENV, "ours")
    environment = server_environment(ServeConfig(model=str(tmp_path), device="cpu", gpus="6"), "s3cret")
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment["VLLM_API_KEY"] == "s3cret"
    assert environment["HF_HUB_OFFLINE"] == "1"  # a folder needs no hub
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", KEY_ENV} & set(environment)


def test_without_vllm_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TeacherError, match=f"pip install vllm.*{PYTHON_ENV}"):
        vllm_python(ServeConfig(model="m"))
    with pytest.raises(TeacherError, match="is no interpreter"):
        vllm_python(ServeConfig(model="m", python=str(tmp_path / "nothing")))
    with pytest.raises(TeacherError, match="has no vLLM"):
        vllm_version(sys.executable)


def test_vllm_is_found_behind_its_command(monkeypatch, tmp_path):
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vllm_python(ServeConfig(model="m")) == sys.executable


def started(command, **settings):
    """A process, and the two ids that it or one of its children prints."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **settings)
    assert process.stdout is not None
    with process.stdout:
        return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("by", ["end of input", "SIGTERM", "SIGKILL"])
def test_the_whole_tree_ends_with_its_keeper(tree, tmp_path, by):
    command = [sys.executable, "-I", keeper.__file__, str(tmp_path / "folder"), str(os.getpid()), *tree]
    kept, pids = started(command, start_new_session=True)
    if by != "end of input":
        kept.send_signal(getattr(signal, by))
    assert kept.stdin is not None
    kept.stdin.close()
    # a keeper that is killed cannot end the grandchild; the server itself gets SIGTERM from the kernel and ends its own
    assert all_gone(pids[:1] if by == "SIGKILL" else pids)
    kept.wait()
    if by == "SIGKILL":
        os.kill(pids[1], signal.SIGKILL)


def test_what_ignores_sigterm_is_killed(tree, tmp_path):
    child, pids = started([*tree, "stubborn"], start_new_session=True)
    with child:
        keeper.end_group(child, grace_s=0.2)
    assert all_gone(pids)


def test_nothing_is_left_when_the_run_is_killed(tree, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "api_key").write_text("s3cret")
    owner, pids = started([sys.executable, "-c", OWNER, keeper.__file__, str(folder), *tree])
    with owner:
        owner.kill()
    assert all_gone(pids)
    deadline = time.monotonic() + 120
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()  # and so the key


def test_a_keeper_whose_parent_is_gone_before_it_begins_keeps_nothing(tree, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    command = [sys.executable, "-I", keeper.__file__, str(folder), str(gone.pid), *tree]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as kept:
        assert kept.wait(timeout=240) != 0
    assert not folder.exists()


def fake_vllm_python(tmp_path, code):
    """An interpreter that says it has vLLM 0.32 and runs `code` in place of the server."""
    body = tmp_path / "server.py"
    body.write_text(code)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ "$1" = -I ] && echo 0.32.0 || exec {sys.executable} {body} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(tmp_path):
    python = fake_vllm_python(tmp_path, "import sys; sys.exit('no such model: org/model')")
    config = ServeConfig(model="org/model", device="cpu", python=python)
    with pytest.raises(TeacherError, match=r"status 1 before it scored[\s\S]*no such model"), serve(config):
        pass


def test_a_server_that_never_scores_is_given_up_and_ended(tmp_path):
    python = fake_vllm_python(tmp_path, "import os, time, pathlib; print(os.getpid(), flush=True); time.sleep(100)")
    log_file = tmp_path / "log"
    limit_s, pids = 0.5, []
    while not pids:  # on a busy machine the server may not have begun yet when its time is over
        config = ServeConfig(model="m", device="cpu", python=python, start_timeout_s=limit_s, log_file=log_file)
        with pytest.raises(TeacherUnavailable, match=rf"did not score within {limit_s:g} s"), serve(config):
            pass
        pids = [int(word) for word in log_file.read_text().split()]
        limit_s *= 4
    assert all_gone(pids)


SERVING = f"""
import os, pathlib, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.teachers.fake_vllm import FakeVllm
arguments = sys.argv
server = FakeVllm(name="m", key=os.environ["VLLM_API_KEY"], port=int(arguments[arguments.index("--port") + 1])).start()
print(*arguments, flush=True)
threading.Event().wait()
"""


def test_a_served_teacher_scores_inside_the_block_and_is_gone_after_it(tmp_path, monkeypatch):
    from teachers.protocol import Row
    from teachers.vllm import VllmTeacher

    monkeypatch.delenv(KEY_ENV, raising=False)
    config = ServeConfig(model="m", device="cpu", python=fake_vllm_python(tmp_path, SERVING))
    with serve(config) as served:
        key = served.key_file.read_text()
        assert len(key) >= 32
        assert served.key_file.stat().st_mode & 0o777 == 0o600
        assert served.key_file.parent.stat().st_mode & 0o777 == 0o700
        assert key not in served.log_file.read_text()  # nor in the command line, which the stand-in prints
        with VllmTeacher(served.url, served.model, api_key_file=served.key_file) as teacher:
            assert teacher.score([Row(prompt_ids=(1,), completion_ids=(2, 3))]).valid_BT.all()
        child = int(Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()[0])
    assert all_gone([served.pid, child])
    assert not served.key_file.parent.exists()


def test_the_server_ends_when_the_block_fails(tmp_path):
    python = fake_vllm_python(tmp_path, SERVING)
    seen = []

    def run():
        with serve(ServeConfig(model="m", device="cpu", python=python)) as served:
            seen.append(served.pid)
            raise RuntimeError("training broke")

    with pytest.raises(RuntimeError):
        run()
    assert all_gone(seen)


def test_a_server_does_not_end_with_the_thread_that_started_it(tmp_path):
    # the kernel's parent-death signal goes by threads; a keeper must not
    python = fake_vllm_python(tmp_path, SERVING)
    context = serve(ServeConfig(model="m", device="cpu", python=python))
    entered = []
    thread = threading.Thread(target=lambda: entered.append(context.__enter__()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert not all_gone([entered[0].pid], within_s=0)
    context.__exit__(None, None, None)
    assert all_gone([entered[0].pid])
