"""The command line as a shell sees it: exit codes, messages, signals, and no slow start."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from pydantic import ValidationError

from hybrid.cli import user_message, with_newest
from hybrid.config import TrainConfig
from hybrid.errors import DataError
from hybrid.tracking import Tracker
from hybrid.ui import ui_command
from teachers.errors import TeacherCannot

ROOT = Path(__file__).resolve().parent.parent
START = [sys.executable, "-m", "hybrid.cli"]


def test_help_and_a_wrong_option_need_no_torch():
    program = (
        "import sys; import hybrid.cli\n"
        "sys.argv = ['hybrid', 'train', '--help']\n"
        "try: hybrid.cli.main()\n"
        "finally: assert not {'torch', 'transformers', 'mlflow'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--resume" in done.stdout
    assert "--set" in done.stdout


@pytest.mark.parametrize("command", ["train", "check", "eval", "methods", "explain", "ui"])
def test_every_command_explains_itself(run_hybrid, command):
    code, out, _ = run_hybrid(command, "--help")
    assert code == 0
    assert "Usage:" in out


def test_without_a_command_there_is_help(run_hybrid):
    code, out, complaint = run_hybrid()
    assert code == 2
    assert "train" in out + complaint


def test_an_unknown_option_is_an_error(run_hybrid):
    code, _, complaint = run_hybrid("train", "x.yaml", "--stes")
    assert code == 2
    assert "--stes" in complaint


@pytest.mark.parametrize("command", ["train", "check", "eval", "ui"])
def test_a_missing_file_is_one_line(run_hybrid, tmp_path, command):
    code, out, complaint = run_hybrid(command, tmp_path / "none.yaml")
    assert (code, out) == (2, "")
    assert complaint == f"{tmp_path}/none.yaml: cannot be read: No such file or directory\n"


def test_an_error_in_the_file_ends_a_training_before_it_starts(run_hybrid):
    code, out, complaint = run_hybrid("train", ROOT / "experiments" / "quickstart.yaml", "--set", "train.stepz=3")
    assert (code, out) == (2, "")
    assert complaint == "--set train.stepz=3: train.stepz: unknown key; did you mean steps?\n"


def test_a_file_that_is_fine_says_so(run_hybrid):
    code, out, complaint = run_hybrid("check", ROOT / "experiments" / "opdvr.yaml", "--set", "seed=3")
    assert (code, complaint) == (0, "")
    assert out.splitlines()[-1].endswith("opdvr.yaml: fine")


def test_methods_are_listed_and_described(run_hybrid):
    code, out, _ = run_hybrid("methods")
    assert code == 0
    assert "opdvr" in out
    code, out, _ = run_hybrid("methods", "kat")
    assert code == 0
    assert "window" in out
    assert "kl" in out
    code, _, complaint = run_hybrid("methods", "opdv")
    assert code == 2
    assert "did you mean opdvr?" in complaint


def test_a_bare_resume_is_the_latest():
    assert with_newest(["train", "x.yaml", "--resume"]) == ["train", "x.yaml", "--resume", "latest"]
    assert with_newest(["train", "--resume", "--set", "a=1", "x"]) == [
        "train",
        "--resume",
        "latest",
        "--set",
        "a=1",
        "x",
    ]
    assert with_newest(["train", "x.yaml", "--resume", "runs/x"]) == ["train", "x.yaml", "--resume", "runs/x"]


def test_users_are_told_of_their_errors_alone():
    assert user_message(DataError("no rows")) == "no rows"
    assert user_message(TeacherCannot("no top_k")) == "no top_k"
    with pytest.raises(ValidationError) as caught:
        TrainConfig(steps=0)
    assert user_message(caught.value) == "steps: Input should be greater than or equal to 1"
    assert user_message(ValueError("a bug of ours")) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_cleanly(tmp_path, number, code):
    pipe = tmp_path / "x.yaml"
    os.mkfifo(pipe)
    command = [*START, "check", str(pipe)]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as program,
        pipe.open("w"),  # opens when the program has begun to read the file, and holds it there
    ):
        program.send_signal(number)
        _, complaint = program.communicate(timeout=240)
    assert program.returncode == code
    assert "Traceback" not in complaint


def test_ui_needs_runs(run_hybrid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, complaint = run_hybrid("ui")
    assert code == 2
    assert "there are no runs yet" in complaint
    assert "mlflow.db does not exist; train first" in complaint


def test_ui_points_to_a_server(run_hybrid):
    code, out, _ = run_hybrid("ui", "--uri", "https://mlflow.example.org")
    assert code == 0
    assert "https://mlflow.example.org" in out


def test_ui_opens_mlflow_on_this_machine_alone_and_leaves_nothing_behind(tmp_path, port):
    with Tracker.open(
        uri=None, experiment="first", run_name="a", folder=tmp_path / "a", tags={}, runs_dir=tmp_path
    ) as tracker:
        tracker.metrics({"loss": 1.0}, step=0)
    command = [*START, "ui", "--folder", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        try:
            assert program.stdout is not None
            said = [program.stdout.readline(), program.stdout.readline()]
            for line in program.stdout:
                if "Uvicorn running on" in line:  # after it has bound the port
                    break
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=240) as answer:
                assert answer.status == 200
        finally:
            program.send_signal(signal.SIGINT)
            program.communicate(timeout=240)
    assert program.returncode == 130
    assert said[0].strip() == f"http://127.0.0.1:{port}"
    assert "--host 127.0.0.1" in said[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)


def test_the_command_of_ui_is_mlflows():
    command = " ".join(ui_command("sqlite:///x.db", 5001)[1:])
    assert command == "-m mlflow ui --backend-store-uri sqlite:///x.db --host 127.0.0.1 --port 5001 --workers 1"
