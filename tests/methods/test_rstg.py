from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.methods.grpo import Grpo
from hybrid.methods.rstg import Rstg
from hybrid.types import Demonstration, RolloutBatch
from tests.batches import NAN, Toy, advantages, make_batch, numbers, plain_batch, run, view
from tests.reference import rstg
from tests.reference.rows import mean, rows_of, tensor_of

seeds = st.integers(0, 10_000)


@given(
    seed=seeds,
    percent=st.sampled_from([10.0, 33.0, 50.0, 100.0]),
    scope=st.sampled_from(["batch", "response"]),
    percentile=st.sampled_from([None, 98.0, 60.0]),
    scale=st.sampled_from(["none", "group", "batch"]),
    exclude_truncated=st.booleans(),
    finished_only=st.booleans(),
)
def test_advantages_against_loops(seed, percent, scope, percentile, scale, exclude_truncated, finished_only):
    batch = make_batch(seed, groups=4)
    rows = rows_of(batch)
    want = rstg.rstg(
        rows,
        k=batch.step,
        percent=percent,
        scope=scope,
        percentile=percentile,
        scale=scale,
        exclude_truncated=exclude_truncated,
        finished_only=finished_only,
    )
    method = Rstg(
        k_percent=percent,
        scope=scope,
        entropy_percentile=percentile,
        scale=scale,
        exclude_truncated=exclude_truncated,
        finished_only=finished_only,
    )
    torch.testing.assert_close(advantages(method.build(), batch), tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds, sft=st.sampled_from(["prompt_mean", "pooled", "in_policy"]))
def test_likelihood_against_loops(seed, sft):
    batch = make_batch(seed, groups=4)
    toy = Toy.same(batch)
    shared_BU = toy.phi_BU.detach()[batch.group_B]  # siblings share their text
    toy = Toy(toy.theta_BT, shared_BU.requires_grad_())
    rows = rows_of(batch, shared_BU)
    got = run(Rstg(sft=sft).build(), batch, toy)
    texts = rstg.imitated(rows)
    beta = rstg.beta_at(batch.step)
    known = sum(
        rstg.kind(rows, row) != "all_wrong" or score is not None for row in rows for score in row.scores["teacher"]
    )
    tokens = sum(len(text) for text in texts)
    plain = run(Rstg(sft="off").build(), batch, toy)
    if sft == "prompt_mean":
        assert got.sft.item() == pytest.approx(beta * mean(mean(-lp for lp in text) for text in texts))
        assert got.policy.item() == pytest.approx(plain.policy.item())
        return
    nll = sum(-lp for text in texts for lp in text)
    value = nll if sft == "pooled" else -tokens
    assert got.sft.item() == pytest.approx(beta * value / (known + tokens))
    assert got.policy.item() == pytest.approx(plain.policy.item() * known / (known + tokens))


@given(seed=seeds)
def test_as_a_policy_the_likelihood_has_the_pooled_gradient(seed):
    batch = make_batch(seed)
    toy = Toy.near(batch)
    gradients = [
        torch.autograd.grad(run(Rstg(sft=sft).build(), batch, toy).total, (toy.theta_BT, toy.phi_BU))
        for sft in ("pooled", "in_policy")
    ]
    for pooled, in_policy in zip(*gradients, strict=True):
        torch.testing.assert_close(pooled, in_policy)


def guided(rewards: list[float], gap: list[list[float]], **fields: Any) -> RolloutBatch:
    rows, width = len(rewards), len(gap[0])
    group: list[int] = fields.pop("group", [0] * rows)
    known = {
        "entropy_BT": numbers([[float(t) for t in range(width)]] * rows),
        "teacher_accuracy_B": numbers([1.0] * rows),
    }
    return plain_batch(
        [width] * rows,
        group,
        reward_B=numbers(rewards),
        student_logprob_BT=numbers([[-5.0] * width] * rows),
        views={"teacher": view([[g - 5 for g in row] for row in gap])},
        **(known | fields),
    )


PLAIN = Rstg(sft="off", entropy_percentile=None, k_percent=100)


def test_only_failed_groups_are_guided():
    batch = guided([0, 0, 1, 0, 1, 1], [[1.0, -1.0]] * 6, group=[0, 0, 1, 1, 2, 2])
    got = advantages(PLAIN.model_copy(update={"scale": "none"}).build(), batch)
    want = [[0.005, -0.005]] * 2 + [[0.5] * 2, [-0.5] * 2] + [[0.0, 0.0]] * 2
    torch.testing.assert_close(got, numbers(want))
    assignment, _ = PLAIN.build().assign(batch, {})
    assert assignment.terms[0].branch_B.tolist() == [0, 0, 1, 1, -1, -1]
    assert PLAIN.build().terms[0].credit.branches == ("all_wrong", "mixed")
    # every response counts in the one denominator, whether it trains or not
    torch.testing.assert_close(assignment.terms[0].share_BT, numbers([[1 / 12] * 2] * 6))


def test_a_teacher_that_is_never_right_gives_nothing():
    got = advantages(PLAIN.build(), guided([0, 0], [[1.0, -1.0]] * 2, teacher_accuracy_B=numbers([0, 0])))
    assert (got == 0).all()


def test_an_accuracy_outside_its_range_is_an_error_where_it_counts():
    batch = guided([0, 0, 1, 0], [[1.0, -1.0]] * 4, group=[0, 0, 1, 1])
    advantages(PLAIN.build(), replace(batch, teacher_accuracy_B=numbers([1, 1, NAN, NAN])))
    with pytest.raises(ValueError, match=r"teacher_accuracy must be in \[0, 1\]; got nan at index \(1,\)"):
        advantages(PLAIN.build(), replace(batch, teacher_accuracy_B=numbers([1, NAN, 1, 1])))


@pytest.mark.parametrize(("percent", "kept"), [(50, 2), (25, 1), (1, 1), (75, 3), (76, 4)])
@pytest.mark.parametrize("scope", ["batch", "response"])
def test_ties_do_not_raise_the_number_of_kept_tokens(percent, kept, scope):
    batch = guided([0], [[1.0] * 4], entropy_BT=numbers([[1.0] * 4]))  # constant: every score is 0
    method = PLAIN.model_copy(update={"k_percent": percent, "scope": scope})
    got = advantages(method.build(), batch)
    assert (got[0] != 0).tolist() == [t < kept for t in range(4)]


def test_rewards_that_are_not_binary():
    method = PLAIN.model_copy(update={"fail_thr": 0.2, "scale": "none"})
    uniform = advantages(method.build(), guided([0.2, 0.2], [[1.0, -1.0]] * 2))
    torch.testing.assert_close(uniform, numbers([[0.005, -0.005]] * 2))
    spread = advantages(method.build(), guided([0.2, 0.1], [[1.0, -1.0]] * 2))
    torch.testing.assert_close(spread, numbers([[0.05] * 2, [-0.05] * 2]))


def test_unscored_rows_do_not_decide_and_are_guided_with_their_group():
    got = advantages(PLAIN.build(), guided([0, NAN], [[1.0, -1.0]] * 2))
    torch.testing.assert_close(got, numbers([[0.005, -0.005]] * 2))
    nobody = advantages(PLAIN.build(), guided([NAN, NAN], [[1.0, -1.0]] * 2))
    assert (nobody == 0).all()


def test_truncated_rows_may_be_left_out():
    batch = guided([0, 0], [[1.0, -1.0]] * 2, truncated_B=torch.tensor([True, False]))
    got = advantages(PLAIN.model_copy(update={"exclude_truncated": True}).build(), batch)
    torch.testing.assert_close(got, numbers([[0, 0], [0.005, -0.005]]))


def test_a_teacher_equal_to_the_student_leaves_plain_grpo():
    batch = make_batch(4)
    same = replace(batch.view("teacher"), logprob_BT=batch.need("student_logprobs"))
    batch = replace(batch, views={"teacher": same})
    torch.testing.assert_close(advantages(Rstg().build(), batch), advantages(Grpo().build(), batch))


def test_no_failed_prompt_with_a_text_is_no_likelihood():
    text = Demonstration(ids_BU=torch.zeros(2, 1, dtype=torch.long), mask_BU=torch.ones(2, 1, dtype=torch.bool))
    batch = guided([1, 0], [[1.0, -1.0]] * 2, demonstration=text)
    toy = Toy.near(batch)
    loss = run(Rstg().build(), batch, toy)
    loss.total.backward()
    assert loss.sft.item() == 0
    assert toy.phi_BU.grad is None or (toy.phi_BU.grad == 0).all()


def test_a_missing_text_is_named():
    with pytest.raises(ValueError, match="needs demonstration, which this run does not measure"):
        Rstg().build().assign(guided([1, 0], [[1.0, -1.0]] * 2), {})


def test_the_teacher_is_asked_about_failed_groups_only():
    assert Rstg(fail_thr=0.25).views["teacher"].options == {"rows": "all_wrong", "fail_thr": 0.25}
    assert Rstg(finished_only=True).views["teacher"].options == {}  # whoever is finished is not known yet
