"""Judging a model behind a server: what it is asked, what comes of its answers, and where they are noted."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from datasets import Dataset

from hybrid.errors import ConfigError, DataError
from hybrid.eval_command import evaluate_experiment
from hybrid.evaluate import Sampling
from hybrid.mlflow_store import open_client
from hybrid.read_config import read_experiment
from hybrid.served_evaluation import evaluate_served, request_of, seed_of
from teachers.errors import TeacherError
from tests.experiments import QUICKSTART, small

SAMPLING = Sampling(samples=2, max_completion_length=7, temperature=0.5, top_p=0.9, batch_size=3, seed=4)


class Server(ThreadingHTTPServer):
    """Answers "1" to even seeds and "2", cut at the limit, to odd ones; `faults` are statuses that come before."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.faults, self.lock = [], [], threading.Lock()
        self.reply = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault is not None:
            self._send(fault, {"error": {"message": "no"}})
            return
        is_even = body["seed"] % 2 == 0
        text, reason = ("1", "stop") if is_even else ("2", "length")
        said = {"message": {"content": text}} if "messages" in body else {"text": text}
        usage = {"completion_tokens": 2 if is_even else body["max_tokens"]}
        self._send(200, self.server.reply or {"choices": [{**said, "finish_reason": reason}], "usage": usage})

    def _send(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    running = Server()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def is_one(completions, **columns):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text == "1") for text in texts]


def ask(server, prompts, sampling=SAMPLING, **settings):
    return evaluate_served(server.url, None, Dataset.from_dict({"prompt": prompts}), [is_one], sampling, settings)


def test_answers_are_counted_row_by_row_however_many_are_asked_at_once(server):
    name, found = ask(server, ["a", "b", "c"])
    even = [[seed_of(4, 2 * prompt + k) % 2 == 0 for k in range(2)] for prompt in range(3)]
    assert name == f"tiny at {server.url}"
    assert found.right_PK.tolist() == even
    assert found.truncated_PK.tolist() == [[not one for one in row] for row in even]
    assert found.length_PK.tolist() == [[2 if one else 7 for one in row] for row in even]
    alone = Sampling(**{**SAMPLING.__dict__, "batch_size": 1})
    assert ask(server, ["a", "b", "c"], alone)[1].texts == found.texts


def test_every_setting_is_sent_and_no_two_responses_share_a_seed(server):
    ask(server, ["a", "b"])
    assert {path for path, _ in server.asked} == {"/v1/completions"}
    wanted = {"model": "tiny", "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 7}
    assert all(wanted.items() <= body.items() for _, body in server.asked)
    assert sorted(body["prompt"] for _, body in server.asked) == ["a", "a", "b", "b"]
    assert len({body["seed"] for _, body in server.asked}) == 4
    assert not {seed_of(4, place) for place in range(50)} & {seed_of(5, place) for place in range(50)}


def test_a_chat_goes_to_the_chat_with_its_template_arguments(server):
    _, found = ask(server, [[{"role": "user", "content": "a"}]], enable_thinking=False)
    assert {path for path, _ in server.asked} == {"/v1/chat/completions"}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for _, body in server.asked)
    assert found.right_PK.shape == (1, 2)
    assert request_of("a", "m", SAMPLING, 1)[1]["prompt"] == "a"


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_named(server):
    server.faults = [503]
    assert ask(server, ["a"])[1].right_PK.shape == (1, 2)
    server.faults = [400]
    with pytest.raises(DataError, match=r"does not take the evaluation: .* answers 400: no"):
        ask(server, ["a"])
    server.faults, server.reply = [], {"choices": []}
    with pytest.raises(DataError, match="answers, and not as a vLLM server does"):
        ask(server, ["a"])


def test_what_cannot_be_asked_is_said_beforehand(server):
    with pytest.raises(DataError, match="the held-out set is empty"):
        ask(server, [])
    pictured = Dataset.from_dict({"prompt": ["a"], "image": ["x"]})
    with pytest.raises(DataError, match="prompts of text"):
        evaluate_served(server.url, None, pictured, [is_one], SAMPLING, {})
    with pytest.raises(TeacherError, match="must begin with http"):
        evaluate_served("localhost:8000", None, pictured.remove_columns("image"), [is_one], SAMPLING, {})
    config = read_experiment(QUICKSTART, [])
    with pytest.raises(ConfigError, match="name two models"):
        evaluate_experiment(config, source=QUICKSTART, checkpoint="x", served=server.url)
    with pytest.raises(ConfigError, match="--served-model belongs to --served"):
        evaluate_experiment(config, source=QUICKSTART, served_model="x")


def test_the_result_stands_in_mlflow_and_in_a_file(server, tmp_path, capsys):
    config = read_experiment(QUICKSTART, small(tmp_path))
    assert evaluate_experiment(config, source=QUICKSTART, served=server.url, served_model="mine") == 0
    (file,) = tmp_path.glob("quickstart/*/evaluation.json")  # another one lies among the artifacts
    found = json.loads(file.read_text())
    assert found["model"] == f"mine at {server.url}"
    assert found["sampling"]["samples"] == 2
    assert {"eval/avg_at_2", "eval/pass_at_1", "eval/pass_at_2", "eval/truncated"} <= set(found)
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run((file.parent / "mlflow_run").read_text())
    assert run.data.metrics["eval/truncated"] == found["eval/truncated"]
    assert run.data.tags["hybrid.kind"] == "evaluation"
    assert run.data.tags["mlflow.note.content"].startswith(f"Held-out accuracy of mine at {server.url} with 2 answers")
    assert run.data.params["sampling.temperature"] == "1.0"
    assert "avg@2" in capsys.readouterr().out
