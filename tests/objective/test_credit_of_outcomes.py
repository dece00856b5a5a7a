"""What right and wrong rows are given on average, as runs log it."""

import pytest

from hybrid.methods import Grpo, GrpoOpd, Opd, Sft
from tests.batches import NAN, make_batch, numbers, plain_batch, view

OLD = [[-1.0, -1.0, -1.0], [-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
TEACHER = [[-0.5, -2.0, -1.0], [-3.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]


def batch(rewards):
    measured = {"student_logprob_BT": numbers(OLD), "views": {"teacher": view(TEACHER)}}
    return plain_batch([3, 2, 1, 1], reward_B=numbers(rewards), **measured)


def test_right_and_wrong_rows_by_hand():
    # teacher minus student: row 0 has 0.5, -1, 0 and row 1 has -2, -1 in its two tokens; the unscored row 2 is neither
    found = Opd().build().assign(batch([1.0, 0.0, NAN, 0.5]), {})[0].metrics
    assert found["credit/right"] == pytest.approx((-0.5, 3.0))
    assert found["credit/wrong"] == pytest.approx((-3.0, 3.0))
    assert "credit/kl_right" not in found


def test_a_side_without_rows_has_nothing_counted():
    found = Grpo().build().assign(batch([1.0, 1.0, 1.0, 1.0]), {})[0].metrics
    assert found["credit/wrong"] == (0.0, 0.0)
    assert found["credit/right"][1] == 7.0


def test_a_mixture_has_the_credit_of_its_sum_and_imitation_has_none():
    mixed = GrpoOpd().build()
    rewarded = make_batch(0)
    assert {"credit/right", "credit/wrong"} <= set(mixed.assign(rewarded, mixed.init())[0].metrics)
    sft = Sft().build()
    assert not [name for name in sft.assign(rewarded, sft.init())[0].metrics if name.startswith("credit/")]


def test_without_rewards_there_are_no_sides():
    unrewarded = plain_batch([3, 2, 1, 1], student_logprob_BT=numbers(OLD), views={"teacher": view(TEACHER)})
    assert "credit/right" not in Opd().build().assign(unrewarded, {})[0].metrics
