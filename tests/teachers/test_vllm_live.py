"""The client against a real vLLM: the same numbers as a local model, and what happens when the server dies."""

import random
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from benchmarks.wire_tap import WireTap
from hybrid.check import check_experiment
from hybrid.methods import method_of
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch, TeacherUnavailable
from teachers.local import LocalTeacher
from teachers.protocol import Row, Want
from teachers.vllm import VllmTeacher
from tests.served import MAX_LOGPROBS, MAX_MODEL_LEN, MODEL_NAME, tiny_model
from tests.tiny_models import VOCABULARY, coin, model, prompts, tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def make_rows(num, seed=0, longest=60):
    rng = random.Random(seed)
    drawn = [[rng.randrange(len(VOCABULARY)) for _ in range(rng.randrange(4, longest))] for _ in range(num)]
    return [Row(prompt_ids=tuple(ids[:3]), completion_ids=tuple(ids[3:])) for ids in drawn]


@pytest.fixture(scope="module")
def local():
    return LocalTeacher(tiny_model())


@pytest.fixture
def connect(vllm_server):
    teachers = []

    def connect(url=vllm_server.url, **settings):
        settings = {"api_key_file": vllm_server.key_file, "timeout_s": 120, "retries": 1, "backoff_s": 0.05, **settings}
        teachers.append(VllmTeacher(url, settings.pop("model", MODEL_NAME), **settings))
        return teachers[-1]

    yield connect
    for teacher in teachers:
        teacher.close()


@pytest.mark.parametrize("way", ["auto", "echo", "plain"])
@pytest.mark.parametrize("top_k", [0, 1, 20])
def test_a_served_teacher_scores_as_a_local_one(connect, local, way, top_k):
    rows = [*make_rows(20), Row(prompt_ids=(4,), completion_ids=()), make_rows(20)[3]]
    served, own = connect(way=way).score(rows, Want(top_k=top_k)), local.score(rows, Want(top_k=top_k))
    assert served.valid_BT.equal(own.valid_BT)
    assert served.temperature == own.temperature
    assert not served.failures
    torch.testing.assert_close(served.logprob_BT, own.logprob_BT, rtol=0, atol=1e-4)
    if top_k:
        torch.testing.assert_close(served.top_logprob_BTK, own.top_logprob_BTK, rtol=0, atol=1e-4)
        torch.testing.assert_close(served.tail_logprob_BT, own.tail_logprob_BT, rtol=0, atol=2e-3)
        assert (served.top_ids_BTK == own.top_ids_BTK)[served.valid_BT].float().mean() > 0.99  # ties change places


def test_the_server_says_who_it_is(connect, vllm_server):
    (facts,) = connect().facts()
    assert (facts.model, facts.root, facts.max_model_len) == (MODEL_NAME, str(vllm_server.folder), MAX_MODEL_LEN)
    assert facts.no_echo is None
    assert "V2 model runner" in facts.no_candidates  # on a CPU; a GPU's runner can


def test_scores_do_not_depend_on_order_repetition_or_compression(connect):
    rows = make_rows(12, seed=1)
    first = connect().score(rows)
    again = connect(compress=True, max_rows=5).score(rows[::-1])
    for i in range(len(rows)):
        length = len(rows[i].completion_ids)
        torch.testing.assert_close(first.logprob_BT[i, :length], again.logprob_BT[-1 - i, :length], rtol=0, atol=1e-5)


def test_compression_halves_what_travels(connect, vllm_server):
    received = {}
    for compress in (False, True):
        with WireTap("127.0.0.1", vllm_server.port) as tap:
            connect(tap.url, compress=compress).score(make_rows(16))
            received[compress] = tap.received
    assert received[True] < received[False] / 2


def test_what_the_server_cannot_do_is_refused_with_its_reason(connect):
    rows = make_rows(2)
    width = max(len(row.completion_ids) for row in rows)
    with pytest.raises(TeacherCannot, match="V2 model runner"):
        connect().score(rows, Want(candidates_BTK=torch.zeros(2, width, 2, dtype=torch.long)))
    with pytest.raises(TeacherCannot, match="--max-logprobs"):
        connect().score(rows, Want(top_k=MAX_LOGPROBS + 1))
    with pytest.raises(TeacherMismatch, match="out of vocabulary"):
        connect().score([Row(prompt_ids=(1,), completion_ids=(len(VOCABULARY) + 9,))])
    with pytest.raises(TeacherMismatch, match=f"serves {MODEL_NAME}, not other"):
        connect(model="other").score(rows)
    with pytest.raises(TeacherError, match="API key"):
        connect(api_key_file=None, api_key_env="HYBRID_NO_SUCH_VARIABLE").score(rows)


def test_the_context_holds_one_token_less_than_it_says(connect):
    fits = Row(prompt_ids=(3,) * 100, completion_ids=(4,) * (MAX_MODEL_LEN - 101))
    too_long = Row(prompt_ids=(3,) * 100, completion_ids=(4,) * (MAX_MODEL_LEN - 100))
    scores = connect().score([fits, too_long])
    assert scores.valid_BT.sum(1).tolist() == [MAX_MODEL_LEN - 101, 0]
    assert list(scores.failures) == [1]


def test_a_server_that_dies_in_the_middle_costs_its_rows_alone_and_comes_back(connect, vllm_server):
    rows = make_rows(16, seed=2)
    before = connect().score(rows)

    replies_left = []

    def kill_after_a_reply(piece):
        if replies_left and b"[DONE]" in piece:
            replies_left.pop()
            vllm_server.kill()

    with WireTap("127.0.0.1", vllm_server.port, on_received=kill_after_a_reply) as tap:
        teacher = connect(tap.url, window=1, max_rows=4)
        teacher.facts()
        replies_left.append(1)
        scores = teacher.score(rows)
        kept = [i for i in range(16) if i not in scores.failures]
        assert 4 <= len(kept) < 16
        assert scores.stats["failed_rows"] == 16 - len(kept)
        torch.testing.assert_close(scores.logprob_BT[kept], before.logprob_BT[kept], rtol=0, atol=1e-5)
        assert not scores.valid_BT[list(scores.failures)].any()
        with pytest.raises(TeacherUnavailable, match="scored no row"):
            teacher.score(rows)
        with pytest.raises(TeacherUnavailable):
            connect(tap.url, policy="stop").score(rows)
        vllm_server.restart()
        after = teacher.score(rows)
    assert not after.failures
    torch.testing.assert_close(after.logprob_BT, before.logprob_BT, rtol=0, atol=1e-5)


class Kill(TrainerCallback):
    """Kills the server after a step."""

    def __init__(self, server, step):
        self.server, self.step = server, step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.server.kill()


def trainer_of(teacher, folder, steps, callbacks=()):
    args = HybridConfig(
        output_dir=str(folder), max_steps=steps, max_completion_length=8, seed=3, disable_tqdm=True, logging_steps=1,
        save_strategy="no", use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        learning_rate=1e-3,
    )  # fmt: skip
    return HybridTrainer(
        model(0), method=method_of("opdvr"), teacher=teacher, reward_funcs=[coin], args=args, train_dataset=prompts(),
        processing_class=tokenizer(), callbacks=[*callbacks],
    )  # fmt: skip


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def test_a_student_trains_with_a_served_teacher_as_with_a_local_one(connect, local, tmp_path):
    served = trainer_of(connect(), tmp_path / "served", 20)
    served.train()
    own = trainer_of(local, tmp_path / "own", 20)  # made now: it seeds the sampling
    own.train()
    assert logged(served, "loss") == pytest.approx(logged(own, "loss"), abs=1e-3)
    assert logged(served, "gap/mean") == pytest.approx(logged(own, "gap/mean"), abs=1e-3)
    assert logged(served, "teacher/failed_rows") == [0] * 20


def test_a_training_whose_server_dies_stops_with_a_checkpoint_and_goes_on_when_it_is_back(
    connect, vllm_server, tmp_path
):
    whole = trainer_of(connect(), tmp_path / "whole", 6)
    whole.train()
    broken = trainer_of(connect(), tmp_path / "broken", 6, [Kill(vllm_server, 3)])
    try:
        with pytest.raises(TeacherUnavailable):
            broken.train()
    finally:
        vllm_server.restart()
    resumed = trainer_of(connect(), tmp_path / "broken", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-4)


def test_a_live_check_compares_a_server_with_the_same_weights_here(vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_TEACHER_API_KEY", vllm_server.key_file.read_text())
    for name, own in (("student", model(0)), ("tiny", tiny_model())):
        own.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    prompts().to_json(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "name: x\nstudent: {model: student}\nmethod: {name: opd}\ndata: {source: rows.jsonl}\nevaluate: null\n"
        f"train: {{max_completion_length: 16}}\nteacher: {{model: tiny, url: '{vllm_server.url}'}}\n"
    )
    found = {f.problem.message.split(":")[0]: f for f in check_experiment(Path("x.yaml"), live=True)}
    assert not [f for f in found.values() if f.level == "error"]
    assert found["against a local model"].problem.message.startswith("against a local model: the same to ")
    assert found["gap to the student"].problem.message.endswith("nats on one token")
