"""A served teacher on bad days: whatever a server does, a score is right, or absent and counted; never a zero."""

import numpy as np
import pytest

from teachers.errors import TeacherMismatch, TeacherUnavailable
from teachers.protocol import Row, Want
from tests.teachers import fake_vllm
from tests.teachers.fake_vllm import ROWS, FakeVllm, assert_right, restarted


def test_slow_is_not_failed(server, connect):
    server.faults = [fake_vllm.slow]
    scores = connect(server.url).score(ROWS)
    assert_right(scores)
    assert "retries" not in scores.stats


def test_a_hanging_server_is_an_error_in_time(server, connect):
    server.faults = [fake_vllm.hang] * 2
    with pytest.raises(TeacherUnavailable, match=r"no answer within 2 s.*timeout_s"):
        connect(server.url, timeout_s=2, retries=1).score(ROWS)
    assert len(server.asked) == 2


@pytest.mark.parametrize("fault", [fake_vllm.busy(503), fake_vllm.busy(500), fake_vllm.busy(429, {"Retry-After": "0"})])
def test_a_busy_server_is_asked_again(server, connect, fault):
    server.faults = [fault, fault]
    scores = connect(server.url).score(ROWS)
    assert_right(scores)
    assert scores.stats["retries"] == 2


def test_rows_that_came_before_a_broken_connection_count(server, connect):
    server.faults = [fake_vllm.drop_after(2)]
    scores = connect(server.url).score(ROWS)
    assert_right(scores)
    assert [len(body["prompt"]) for body in server.asked] == [3, 1]
    assert scores.stats["replicas_lost"] == 1


def test_too_few_scores_are_never_aligned_from_the_end(server, connect):
    server.faults = [fake_vllm.spoiled(lambda values, choice: values["token_logprobs"].pop(1))]
    scores = connect(server.url, retries=0).score(ROWS)  # the sorted rows begin with ROWS[0]
    assert_right(scores, but=[0])
    assert "returned 4 scores for 5 tokens" in scores.failures[0]


def test_scores_of_other_ids_are_refused(server, connect):
    server.faults = [fake_vllm.spoiled(lambda values, choice: choice["prompt_token_ids"].__setitem__(2, 33))]
    scores = connect(server.url, retries=0).score(ROWS)
    assert_right(scores, but=[0])
    assert "other ids" in scores.failures[0]


def test_a_bad_row_alone_is_asked_again(server, connect):
    server.faults = [fake_vllm.spoiled(lambda values, choice: values.pop("token_logprobs"), index=1)]
    assert_right(connect(server.url).score(ROWS))
    assert [len(body["prompt"]) for body in server.asked] == [3, 1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [("null", "null"), ("NaN", "nan"), ("-9999.0", "floored"), ("-Infinity", "floored"), ("3.5", "positive")],
)
def test_a_value_that_is_no_logprob_is_masked_and_counted(server, connect, value, kind):
    good = f"{fake_vllm.sampled([1, 5, 9, 4, 7])[3]}"  # of ROWS[0]'s second completion token
    server.faults = [fake_vllm.raw(lambda text: text.replace(good, value))]
    scores = connect(server.url).score(ROWS)
    assert scores.valid_BT.tolist() == [[True, False, True], [True, True, False], [True, False, False]]
    assert scores.logprob_BT[0, 1] == 0
    assert scores.stats[f"{kind}_tokens"] == 1
    assert not scores.failures


def test_a_broken_support_masks_its_position(server, connect):
    def spoil(values, choice):
        position = values["top_logprobs"][3]
        position[next(reversed(position))] = float("nan")

    server.faults = [fake_vllm.spoiled(spoil)]
    scores = connect(server.url).score(ROWS, Want(top_k=3))
    assert scores.valid_BT[0].tolist() == [True, False, True]
    assert scores.top_ids_BTK[0, 1].tolist() == [-1, -1, -1]
    assert scores.top_logprob_BTK[0, 1].tolist() == [-np.inf] * 3
    assert scores.stats["nan_tokens"] == 1


def test_a_support_smaller_than_asked_for_fails_the_row(server, connect):
    server.faults = [
        fake_vllm.spoiled(lambda values, choice: values["top_logprobs"].__setitem__(3, {"token_id:4": -1}))
    ]
    scores = connect(server.url, retries=0).score(ROWS, Want(top_k=3))
    assert_right(scores, but=[0])
    assert "1 ids at a position where 3 were asked for" in scores.failures[0]


def test_text_keys_fail_the_row(server, connect):
    def spoil(values, choice):
        values["top_logprobs"] = [p and {f"word{key}": v for key, v in p.items()} for p in values["top_logprobs"]]

    server.faults = [fake_vllm.spoiled(spoil)]
    scores = connect(server.url, retries=0).score(ROWS, Want(top_k=2))
    assert_right(scores, but=[0])
    assert "no id but a text" in scores.failures[0]


def test_replies_in_another_order_find_their_rows(server, connect):
    server.faults = [fake_vllm.in_reverse]
    assert_right(connect(server.url).score(ROWS))


def test_a_row_of_nothing_but_zeros_is_counted_as_suspicious(server, connect):
    server.faults = [fake_vllm.spoiled(lambda values, choice: values.update(token_logprobs=[None, 0.0, 0.0, 0.0, 0.0]))]
    assert connect(server.url).score(ROWS).stats["suspicious_rows"] == 1


def test_rows_that_fail_after_all_retries_are_masked(server, connect):
    spoil = fake_vllm.spoiled(lambda values, choice: values.pop("token_logprobs"))
    server.faults = [spoil, spoil, spoil]
    scores = connect(server.url).score(ROWS)
    assert_right(scores, but=[0])
    assert scores.stats["failed_rows"] == 1
    assert scores.stats["retries"] == 2


def test_the_run_stops_at_the_first_failed_row_where_that_is_the_policy(server, connect):
    server.faults = [fake_vllm.spoiled(lambda values, choice: values.pop("token_logprobs"))]
    with pytest.raises(TeacherUnavailable, match="policy is to stop"):
        connect(server.url, policy="stop", retries=0).score(ROWS)


def test_the_run_stops_where_every_row_fails(server, connect):
    server.faults = [fake_vllm.busy(500)] * 3
    with pytest.raises(TeacherUnavailable, match=r"scored no row: .* answers 500: too much to do"):
        connect(server.url).score(ROWS)


def test_another_served_name_is_a_mismatch(server, connect):
    with pytest.raises(TeacherMismatch, match="serves tiny, not large"):
        connect(server.url, model="large").score(ROWS)


def test_a_restart_with_another_name_is_a_mismatch(server, connect):
    teacher = connect(server.url, model="tiny")
    assert_right(teacher.score(ROWS))
    restarted(server, name="other")
    with pytest.raises(TeacherMismatch, match="serves other, not tiny"):
        teacher.score(ROWS)


def test_a_restart_with_other_weights_under_the_same_name_is_a_mismatch(server, connect):
    teacher = connect(server.url, model="tiny")
    assert_right(teacher.score(ROWS))
    restarted(server, seed=1, fingerprint="vllm-0.32.0-bbbb")
    with pytest.raises(TeacherMismatch, match=r"nats per token away .*other weights"):
        teacher.score(ROWS)


def test_a_restart_with_the_same_weights_goes_on(server, connect):
    teacher = connect(server.url, model="tiny")
    assert_right(teacher.score(ROWS))
    restarted(server, fingerprint="vllm-0.33.0-cccc")
    assert_right(teacher.score(ROWS))


def test_a_dead_replica_is_taken_out_and_comes_back(start, server, connect, monkeypatch):
    monkeypatch.setattr("teachers.replicas.RECHECK_S", 0.0)
    other = start(FakeVllm())
    teacher = connect(server.url, other.url, max_rows=1)
    rows = [Row(prompt_ids=(1,), completion_ids=(i,)) for i in range(20, 32)]
    assert_right(teacher.score(rows), rows)
    assert len(server.asked) > 2
    assert len(other.asked) > 2
    other.stop()
    assert_right(teacher.score(rows), rows)
    other.__dict__ = FakeVllm(port=other.port).start().__dict__
    while not other.asked:  # each score gives the check of the lost replica its turn
        assert_right(teacher.score(rows), rows)


def test_a_replica_with_other_weights_does_not_take_part(start, server, connect, caplog):
    other = start(FakeVllm(seed=1))
    teacher = connect(server.url, other.url, max_rows=1)
    assert_right(teacher.score(ROWS))
    assert not other.asked
    assert "other weights" in caplog.text
