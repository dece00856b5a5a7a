from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.r2opd import R2Opd
from tests.batches import NAN, Toy, advantages, make_batch, numbers, plain_batch, run, view
from tests.reference import losses, opdvr
from tests.reference.rows import rows_of, tensor_of

seeds = st.integers(0, 10_000)


@given(
    seed=seeds,
    inverse=st.booleans(),
    truncated=st.sampled_from(["as_wrong", "skip", "vanilla_opd"]),
    ratio_clip=st.sampled_from([None, 0.7]),
    thr=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_opdvr_against_loops(seed, inverse, truncated, ratio_clip, thr):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = opdvr.opdvr(rows, thr=thr, inverse=inverse, truncated=truncated, ratio_clip=ratio_clip)
    method = Opdvr(thr=thr, inverse=inverse, truncated=truncated, ratio_clip=ratio_clip).build()
    torch.testing.assert_close(advantages(method, batch), tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds)
def test_loss_against_loops(seed):
    batch = make_batch(seed)
    rows = rows_of(batch)
    toy = Toy.near(batch)
    current_BT = batch.need("student_logprobs") + 8 * toy.theta_BT.detach()  # far enough for the clips to bind
    toy = Toy((8 * toy.theta_BT).detach(), toy.phi_BU)
    current = [[float(current_BT[i, t]) for t in row.places] for i, row in enumerate(rows)]
    known = [[score is not None for score in row.scores["teacher"]] for row in rows]
    want = losses.policy_token_mean(rows, opdvr.opdvr(rows), current, known=known, dual=1.2)
    got = run(Opdvr(dual_clip=1.2).build(), batch, toy)
    assert got.total.item() == pytest.approx(want)
    assert got.policy.item() == got.total.item()


@given(seed=seeds, norm_by_std=st.booleans(), u=st.sampled_from([0.0, 0.3]))
def test_grpd_code_against_loops(seed, norm_by_std, u):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = opdvr.grpd_code(rows, norm_by_std=norm_by_std, u=u)
    got = advantages(Grpd(norm_by_std=norm_by_std, u=u).build(), batch)
    torch.testing.assert_close(got, tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds)
def test_grpd_sign_against_loops(seed):
    batch = make_batch(seed)
    rows = rows_of(batch)
    got = advantages(Grpd(grpd_variant="sign").build(), batch)
    torch.testing.assert_close(got, tensor_of(rows, opdvr.grpd_sign(rows), batch.mask_BT.shape[1]))


@given(
    seed=seeds,
    beta=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    truncated=st.sampled_from(["as_wrong", "skip", "vanilla_opd"]),
)
def test_r2opd_against_loops(seed, beta, truncated):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = opdvr.r2opd(rows, beta=beta, truncated=truncated)
    got = advantages(R2Opd(beta=beta, truncated=truncated).build(), batch)
    torch.testing.assert_close(got, tensor_of(rows, want, batch.mask_BT.shape[1]))


def small(rewards: list[float], gap: list[float], **fields):
    rows = len(rewards)
    return plain_batch(
        [len(gap)] * rows,
        reward_B=numbers(rewards),
        student_logprob_BT=numbers([[-5.0] * len(gap)] * rows),
        views={"teacher": view([[g - 5.0 for g in gap]] * rows)},
        **fields,
    )


def test_a_zero_gap_and_an_unknown_outcome_give_nothing():
    got = advantages(Opdvr().build(), small([1, 0, NAN], [0.0, 2.0]))
    assert got.tolist() == [[0, 2], [0, 0], [0, 0]]


def test_every_row_of_a_uniform_group_is_gated_by_its_outcome():
    right = advantages(Opdvr().build(), small([1, 1], [1.0, -1.0]))
    wrong = advantages(Opdvr().build(), small([0, 0], [1.0, -1.0]))
    assert right.tolist() == [[1, 0]] * 2
    assert wrong.tolist() == [[0, -1]] * 2


@pytest.mark.parametrize("rewards", [[1, 1, 1], [0, 0, 0], [1]])
@pytest.mark.parametrize("variant", ["code", "sign"])
def test_grpd_gives_uniform_groups_nothing(rewards, variant):
    got = advantages(Grpd(grpd_variant=variant).build(), small(rewards, [1.0, -1.0]))
    assert (got == 0).all()


def test_the_clip_bounds_an_infinite_gap_and_its_share_is_told():
    batch = small([0], [-float("inf"), 1.0, -0.2])
    method = Opdvr(ratio_clip=0.5).build()
    assert advantages(method, batch).tolist() == [[-0.5, 0, pytest.approx(-0.2)]]
    assignment, _ = method.assign(batch, {})
    assert assignment.metrics["gap/at_clip"] == (2.0, 3.0)


def test_an_infinite_gap_without_a_clip_is_an_error_with_its_place():
    with pytest.raises(ValueError, match=r"signal 'gap' must be finite where it is known; got -inf at index \(0, 1\)"):
        advantages(Opdvr().build(), small([0], [1.0, -float("inf")]))


def test_metrics_tell_what_the_gate_did():
    assignment, _ = Opdvr().build().assign(small([1, 0, NAN], [2.0, -1.0]), {})
    metrics = assignment.metrics
    assert metrics["kept/outcome_agrees"] == (2.0, 6.0)
    assert metrics["outcome/right"] == (1.0, 2.0)
    assert metrics["raised/mean"] == (2.0, 1.0)
    assert metrics["lowered/mean"] == (-1.0, 1.0)


def test_top_k_gates_every_candidate_by_itself():
    """w = softmax over the student's candidates; right: max(0, .), wrong: min(0, .) of each w_k (lpT_k - lpS_k)."""
    student, teacher = numbers([0.5, 0.3]).log(), numbers([0.25, 0.6]).log()
    batch = small([1, 0], [0.0])
    top = {"top_ids_BTK": torch.tensor([[[4, 7]]] * 2)}
    batch = replace(
        batch,
        views={
            "student": replace(view([[-5.0]] * 2), top_logprob_BTK=student.expand(2, 1, 2), **top),
            "teacher": replace(view([[-5.0]] * 2), top_logprob_BTK=teacher.expand(2, 1, 2), **top),
        },
    )
    assignment, _ = Opdvr(top_k=2).build().assign(batch, {})
    down, up = (
        -0.625 * torch.tensor(2.0).log(),
        0.375 * torch.tensor(2.0).log(),
    )  # weights 5/8 and 3/8; gaps -ln 2, ln 2
    got = assignment.terms[0].candidate_BTK
    assert got is not None
    torch.testing.assert_close(got[:, 0], torch.stack([torch.stack([down * 0, up]), torch.stack([down, up * 0])]))
