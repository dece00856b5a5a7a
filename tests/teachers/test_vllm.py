"""What a served teacher is asked, and how its answers are read: wants, rows, keys, certificates, settings."""

import contextlib
import datetime
import ipaddress
import ssl
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch, TeacherUnavailable
from teachers.protocol import Row, Teacher, Want
from teachers.vllm import VllmTeacher
from tests.teachers import fake_vllm
from tests.teachers.fake_vllm import ROWS, FakeGpuVllm, FakeVllm, assert_right


def test_it_is_a_teacher(server, connect):
    assert isinstance(connect(server.url), Teacher)


@pytest.mark.parametrize("way", ["echo", "plain"])
def test_each_row_has_its_own_scores(server, connect, way):
    assert_right(connect(server.url, way=way).score(ROWS))


def test_the_sampled_id_is_looked_up_and_not_the_best_one(server, connect):
    # pitfall: ids [9, 11, 7], reply [null, {"11": rank 1}, {"7": -5.0 rank 40, "3": -0.1 rank 1}] -> [-0.2, -5.0]
    async def reply(server, body):
        entries = [None, {"11": {"logprob": -0.2, "rank": 1}}]
        entries.append({"3": {"logprob": -0.1, "rank": 1}, "7": {"logprob": -5.0, "rank": 40}})
        return fake_vllm.web.json_response({"choices": [{"index": 0, "prompt_logprobs": entries}]})

    server.faults = [reply]
    scores = connect(server.url, way="plain").score([Row(prompt_ids=(9,), completion_ids=(11, 7))])
    torch.testing.assert_close(scores.logprob_BT, torch.tensor([[-0.2, -5.0]]))


@pytest.mark.parametrize("way", ["echo", "plain"])
def test_the_teachers_own_support_comes_in_falling_order(server, connect, way):
    scores = connect(server.url, way=way).score(ROWS, Want(top_k=3))
    assert_right(scores)
    for i, row in enumerate(ROWS):
        table = torch.tensor(fake_vllm.logprobs([*row.prompt_ids, *row.completion_ids]), dtype=torch.float32)
        best = table[len(row.prompt_ids) - 1 : -1].topk(3)
        length = len(row.completion_ids)
        assert scores.top_ids_BTK[i, :length].tolist() == best.indices.tolist()
        torch.testing.assert_close(scores.top_logprob_BTK[i, :length], best.values)
        torch.testing.assert_close(
            scores.tail_logprob_BT[i, :length], torch.log1p(-best.values.exp().sum(-1)), rtol=1e-4, atol=1e-5
        )
        assert (scores.top_ids_BTK[i, length:] == -1).all()


def test_a_server_without_the_echo_is_asked_the_long_way(server, connect):
    server.always = [fake_vllm.without_echo]
    teacher = connect(server.url)
    assert_right(teacher.score(ROWS, Want(top_k=3)))
    assert "echo is not supported" in teacher.facts()[0].no_echo


def test_the_students_candidates_are_scored_where_the_server_can(start, connect):
    server = start(FakeGpuVllm())
    candidates = torch.full((3, 3, 2), -1)
    candidates[0] = torch.tensor([[4, 40], [7, -1], [0, 1]])
    candidates[1, :2] = torch.tensor([[30, 31], [32, 33]])
    candidates[2, 0] = torch.tensor([49, 2])
    scores = connect(server.url).score(ROWS, Want(candidates_BTK=candidates))
    assert_right(scores)
    assert scores.top_ids_BTK.equal(candidates)
    table = fake_vllm.logprobs([1, 5, 9, 4, 7])
    wanted = [[table[1, 4], table[1, 40]], [table[2, 7], -np.inf], [table[3, 0], table[3, 1]]]
    torch.testing.assert_close(scores.top_logprob_BTK[0], torch.tensor(wanted, dtype=torch.float32))
    assert len(server.asked) == 3


def test_such_a_server_sends_the_sampled_scores_alone(start, connect):
    server = start(FakeGpuVllm())
    assert_right(connect(server.url).score(ROWS))
    assert [len(body["sampling_params"]["prompt_logprob_token_ids"][0]) for body in server.asked] == [1, 1, 1]


def test_candidates_are_refused_with_the_servers_reason(server, connect):
    with pytest.raises(TeacherCannot, match=r"V2 model runner.*top_k"):
        connect(server.url).score(ROWS, Want(candidates_BTK=torch.zeros(3, 3, 2, dtype=torch.long)))


def test_distributions_temperatures_and_images_are_refused(server, connect):
    with pytest.raises(TeacherCannot, match="distributions"):
        connect(server.url).score(ROWS, Want(distribution=True))
    with pytest.raises(TeacherCannot, match=r"temperature 0\.7"):
        connect(server.url, temperature=0.7)
    with pytest.raises(TeacherCannot, match="row 0 has images"):
        connect(server.url).score([Row(prompt_ids=(1,), completion_ids=(2,), images=(object(),))])


def test_a_support_over_the_servers_limit_names_the_flag(server, connect):
    with pytest.raises(TeacherCannot, match=r"max allowed: 20.*--max-logprobs"):
        connect(server.url).score(ROWS, Want(top_k=21))


def test_an_id_the_teacher_does_not_know_is_a_mismatch(server, connect):
    with pytest.raises(TeacherMismatch, match="Token id 60"):
        connect(server.url).score([*ROWS, Row(prompt_ids=(1,), completion_ids=(60,))])
    asked = len(server.asked)
    with pytest.raises(TeacherMismatch, match=r"row 3 has id 50, .* knows 50 ids"):  # vLLM 0.32 would die of this one
        connect(server.url, vocab_size=50).score([*ROWS, Row(prompt_ids=(1,), completion_ids=(50,))])
    assert len(server.asked) == asked


def test_a_row_over_the_context_is_masked_and_counted(server, connect):
    # 32 + 31 ids and the one dummy token that the server makes fill the 64; one id more does not fit
    fits = Row(prompt_ids=(1,) * 32, completion_ids=(2,) * 31)
    too_long = Row(prompt_ids=(1,) * 32, completion_ids=(2,) * 32)
    scores = connect(server.url).score([fits, too_long])
    assert_right(scores, [fits, too_long], but=[1])
    assert "need a context of 65" in scores.failures[1]
    assert scores.stats["failed_rows"] == 1


def test_a_row_that_the_server_refuses_does_not_take_the_others_along(server, connect):
    rows = [*ROWS, Row(prompt_ids=(1,), completion_ids=(13,)), Row(prompt_ids=(1,), completion_ids=(14,))]
    scores = connect(server.url).score(rows)
    assert_right(scores, rows, but=[3])
    assert "bad luck" in scores.failures[3]


def test_empty_completions_and_duplicates_are_not_asked(server, connect):
    empty = Row(prompt_ids=(1,), completion_ids=())
    scores = connect(server.url).score([ROWS[0], empty, ROWS[0], ROWS[1], ROWS[0]])
    assert_right(scores, [ROWS[0], empty, ROWS[0], ROWS[1], ROWS[0]])
    assert sum(len(body["prompt"]) for body in server.asked) == 2
    assert scores.stats["duplicate_rows"] == 2
    assert connect(server.url).score([]).logprob_BT.shape == (0, 0)
    assert connect(server.url).score([empty]).logprob_BT.shape == (1, 0)


def test_an_empty_prompt_is_refused(server, connect):
    with pytest.raises(TeacherMismatch, match="row 1 has an empty prompt"):
        connect(server.url).score([ROWS[0], Row(prompt_ids=(), completion_ids=(3, 4))])


def test_rows_of_a_prompt_stand_together(server, connect):
    rows = [Row(prompt_ids=(1 + i % 3,), completion_ids=(20 + i,)) for i in range(9)]
    assert_right(connect(server.url, max_rows=3).score(rows), rows)
    assert [{ids[0] for ids in body["prompt"]} for body in server.asked] == [{1}, {2}, {3}]


def test_no_more_requests_than_the_window_are_on_their_way(server, connect):
    rows = [Row(prompt_ids=(1,), completion_ids=(i,)) for i in range(12)]
    server.faults = [fake_vllm.until_open(3)] * 12
    assert_right(connect(server.url, max_rows=1, window=3).score(rows), rows)
    assert server.most_open == 3


def test_a_submitted_batch_leaves_the_student_free(server, connect):
    go_on = threading.Event()

    async def wait(server, body):
        await server.loop.run_in_executor(None, go_on.wait)

    server.faults = [wait]
    future = connect(server.url).submit(ROWS)
    assert not future.done()
    go_on.set()
    assert_right(future.result(120))


def test_the_key_is_sent_and_never_shown(start, connect, monkeypatch, tmp_path, caplog):
    server = start(FakeVllm(key="s3cret"))
    with pytest.raises(TeacherError, match=r"401.*API key") as refused:
        connect(server.url).score(ROWS)
    monkeypatch.setenv("HYBRID_TEACHER_API_KEY", "s3cret")
    teacher = connect(server.url)
    assert_right(teacher.score(ROWS))
    assert "s3cret" not in f"{refused.value}{caplog.text}{teacher!r}{teacher._settings!r}"

    monkeypatch.setenv("HYBRID_TEACHER_API_KEY", "wrong")
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    file.chmod(0o644)
    with pytest.raises(TeacherError, match="chmod 600"):
        connect(server.url, api_key_file=file)
    file.chmod(0o600)
    assert_right(connect(server.url, api_key_file=file).score(ROWS))
    with pytest.raises(TeacherError, match="carries credentials"):
        connect("http://me:s3cret@127.0.0.1")


def test_compressed_replies_are_asked_for_and_read(server, connect):
    server.compress = True
    assert_right(connect(server.url, compress=True).score(ROWS))
    assert "echo" not in server.asked[-1]  # vLLM compresses no streams
    assert "gzip" in server.headers[-1]["Accept-Encoding"]
    assert_right(connect(server.url).score(ROWS))
    assert server.headers[-1]["Accept-Encoding"] == "identity"  # on this machine it would cost more than it saves


@pytest.fixture
def certificate(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private


def test_certificates_are_verified(start, connect, certificate):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    server = start(FakeVllm(tls=tls))
    with pytest.raises(TeacherUnavailable, match="certificate verify failed"):
        connect(server.url, retries=0).score(ROWS)
    assert_right(connect(server.url, ca_file=str(certificate[0])).score(ROWS))


def test_rows_that_are_sent_while_it_is_closed_are_scored_or_given_up(server, connect):
    teacher, interval = connect(server.url), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as other:
            for _ in range(20):
                closing = other.submit(teacher.close)
                future = teacher.submit(ROWS)
                closing.result(120)
                with contextlib.suppress(CancelledError):
                    assert_right(future.result(120))
    finally:
        sys.setswitchinterval(interval)


def test_a_closed_teacher_can_be_closed_again_and_used_again(server):
    teacher = VllmTeacher(server.url)
    teacher.close()
    assert_right(teacher.score(ROWS))
    teacher.close()
    teacher.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window"),
        ({"retries": -1}, "retries"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"policy": "zero"}, "policy"),
        ({"url": []}, "no url"),
        ({"url": "127.0.0.1:8000"}, "http"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(TeacherError, match=message):
        VllmTeacher(**{"url": "http://127.0.0.1:1", **settings})
