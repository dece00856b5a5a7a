"""Every numeric fixture of methods_core.md 6.6, and the two structural facts of 1.6."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.methods.kat import Kat
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.rstg import Rstg
from hybrid.methods.sipo import Sipo
from hybrid.methods.va_opd import VaOpd
from hybrid.objective.gates import token_score
from hybrid.objective.kl_trap import Trap, trap_cut, trap_threshold, window_means
from hybrid.objective.step import blank
from hybrid.objective.view_gap import rank_split, sibling_softmax
from hybrid.objective.weights import weight_by_advantage_size
from hybrid.types import RolloutBatch
from tests.batches import advantages, kl_weights, make_batch, numbers, plain_batch, view

D = [0.05, 1.0, -1.0, 0.0]
KL = [2, 1.8, 1.5, 1.2, 0.9, 0.5, 0.1, 0.08, 0.05, 0.04, 0.06, 0.3, 0.5]


def test_va_opd_sibling_weights():
    got = sibling_softmax(
        numbers([0.045, 0.030, 0.020, 0.010]),
        torch.zeros(4, dtype=torch.long),
        torch.ones(4, dtype=torch.bool),
        tau=1.0,
        eps=1e-6,
    )
    torch.testing.assert_close(got, numbers([0.65577, 0.20558, 0.09487, 0.04378]), atol=1e-5, rtol=0)
    # the paper's figure
    torch.testing.assert_close(got, numbers([0.656, 0.206, 0.095, 0.044]), atol=5e-4, rtol=0)


def test_va_opd_token_coefficients():
    got = rank_split(numbers([[9, 1, 1, 1, 1]]), torch.ones(1, 5, dtype=torch.bool), p_v=0.2, lam=0.5)
    torch.testing.assert_close(got, numbers([[0.5, 0.125, 0.125, 0.125, 0.125]]))


def test_va_opd_as_a_method():
    batch = plain_batch(
        [5],
        reverse_kl_BT=numbers([[1, 2, 3, 4, 5]]),
        views={"teacher": view([[-1.0] * 5]), "degraded": view([[-10, -2, -2, -2, -2]])},
    )
    want = numbers([[0.5, 0.125, 0.125, 0.125, 0.125]])
    torch.testing.assert_close(kl_weights(VaOpd().build(), batch), want)


@pytest.fixture
def gaps() -> RolloutBatch:
    return plain_batch(
        [4, 4],
        reward_B=numbers([1, 0]),
        student_logprob_BT=numbers([[-1.5, -1, -0.5, -0.2]] * 2),
        views={"teacher": view([[-1, -2, -0.5, -3]] * 2)},
    )


def test_opd(gaps: RolloutBatch):
    torch.testing.assert_close(advantages(Opd().build(), gaps), numbers([[0.5, -1, 0, -2.8]] * 2))


def test_opdvr(gaps: RolloutBatch):
    torch.testing.assert_close(advantages(Opdvr().build(), gaps), numbers([[0.5, 0, 0, 0], [0, -1, 0, -2.8]]))


def test_opdvr_inverse_is_the_complement(gaps: RolloutBatch):
    got = advantages(Opdvr(inverse=True).build(), gaps)
    torch.testing.assert_close(got, numbers([[0, -1, 0, -2.8], [0.5, 0, 0, 0]]))


@pytest.mark.parametrize(
    ("scale", "eps", "want"), [("none", 0.0, [0.75, 0.25, 0.25, 0.25]), ("group", 0.0, [1.5, 0.5, 0.5, 0.5])]
)
def test_grpd_scale(scale: Literal["none", "group"], eps: float, want: list[float]):
    batch = plain_batch([1] * 4, reward_B=numbers([1, 0, 0, 0]), student_logprob_BT=numbers([[-1.0]] * 4))
    credit, _ = weight_by_advantage_size(scale=scale, eps=eps).apply(blank(batch), batch, {})
    torch.testing.assert_close(credit.weight_BT[:, 0], numbers(want))


def test_grpd_as_a_method(gaps: RolloutBatch):
    # correctness (1, 0): |a| = (0.5, 0.5); with the deviation sqrt(1/2): 0.5 / (0.70711 + 1e-6)
    gated = numbers([[0.5, 0, 0, 0], [0, -1, 0, -2.8]])
    torch.testing.assert_close(advantages(Grpd().build(), gaps), 0.5 * gated)
    torch.testing.assert_close(advantages(Grpd(u=1.0).build(), gaps), 1.5 * gated)
    scaled = advantages(Grpd(norm_by_std=True).build(), gaps)
    torch.testing.assert_close(scaled, 0.5 / (0.5**0.5 + 1e-6) * gated)


def contrast_batch(rewards: list[float]) -> RolloutBatch:
    rows = len(rewards)
    return plain_batch(
        [4] * rows,
        reward_B=numbers(rewards),
        student_logprob_BT=numbers([[-1.0] * 4] * rows),
        views={"right": view([D] * rows), "wrong": view([[0.0] * 4] * rows)},
    )


@pytest.mark.parametrize(
    ("rewards", "row", "want"),
    [
        ([1, 0, 0, 0], 0, [0.775, 0.85, 0.65, 0.75]),
        ([1, 0, 0, 0], 1, [-0.225, -0.15, -0.35, -0.25]),
        ([0, 0, 0, 0], 2, [0.025, 0.1, -0.1, 0]),
        ([0.1, 0], 0, [0.075, 0.15, 0, 0.05]),  # A_r = 0.05, so the guard engages
    ],
)
def test_sipo_additive(rewards: list[float], row: int, want: list[float]):
    got = advantages(Sipo().build(), contrast_batch(rewards))
    torch.testing.assert_close(got[row], numbers(want))


@pytest.mark.parametrize(("row", "want"), [(0, [0.76923, 0.825, 0.675, 0.75]), (1, [-0.24390, -0.225, -0.275, -0.25])])
def test_sipo_multiplicative(row: int, want: list[float]):
    got = advantages(Sipo(form="multiplicative").build(), contrast_batch([1, 0, 0, 0]))
    torch.testing.assert_close(got[row], numbers(want), atol=1e-5, rtol=0)


def test_rstg_token_score():
    got = token_score(
        numbers([[0.1, 1.2, 0.4, 2.0, 0.05]]),
        numbers([[-0.2, 0.1, -3, -0.5, -0.05]]),
        torch.ones(1, 5, dtype=torch.bool),
        entropy_percentile=None,
    )
    torch.testing.assert_close(got, numbers([[0.0752, 0.5967, 1, 1, 0]]), atol=5e-5, rtol=0)


def test_rstg_beta():
    beta = Rstg().beta
    assert [beta(k) for k in (0, 1, 40, 80, 200)] == pytest.approx([5e-3, 4.95e-3, 3e-3, 1e-3, 1e-3])


def test_rstg_as_a_method():
    # k% = 50 of 5 tokens keeps ceil(2.5) = 3: those of score 1, 1 and 0.5967; beta 5e-3, omega 0.5
    batch = plain_batch(
        [5, 0],
        reward_B=numbers([0, 0]),
        student_logprob_BT=numbers([[-1.0] * 5] * 2),
        entropy_BT=numbers([[0.1, 1.2, 0.4, 2.0, 0.05]] * 2),
        teacher_accuracy_B=numbers([0.5, 0.5]),
        views={"teacher": view([[-1.2, -0.9, -4, -1.5, -1.05]] * 2)},
    )
    got = advantages(Rstg(sft="off", entropy_percentile=None).build(), batch)
    torch.testing.assert_close(got[0], 0.0025 * numbers([0, 0.1, -3, -0.5, 0]))


def test_kat_windows_and_threshold():
    assert float(window_means(numbers(KL), 3).min()) == pytest.approx(0.05)
    assert trap_threshold([0.02, 0.05, 0.1, 0.12, 0.2], eta=0.3) == pytest.approx(0.116)


def test_kat_cut():
    trap = Trap(window=3, patience=3, n_exempt=0)
    assert trap_cut(numbers(KL), trap=trap, threshold=0.116) == 6
    # windows that end at 8, 9 and 10 are low: (0.0767, 0.0567, 0.05); the one before is 0.2267
    means = window_means(numbers(KL), 3)
    assert (means < 0.116).nonzero()[:, 0].tolist() == [6, 7, 8]


def test_kat_as_a_method():
    method = Kat(window=3, patience=3, n_exempt=0, min_samples=5, warmup_steps=0).build()
    batch = plain_batch([13], student_logprob_BT=numbers([[-1.0] * 13]), reverse_kl_BT=numbers([KL]))
    state = {"kl_minima": [0.02, 0.05, 0.1, 0.12, 0.2]}
    assert kl_weights(method, batch, state)[0].tolist() == [1.0] * 6 + [0.0] * 7
    _, after = method.assign(batch, state)
    assert after["kl_minima"] == pytest.approx([0.02, 0.05, 0.1, 0.12, 0.2, 0.05])


@given(seed=st.integers(0, 1000))
def test_opdvr_never_opposes_the_outcome(seed: int):
    """<d_OPDVR, d_RLVR> = ReLU(z r) |u|^2 >= 0, token by token, with d_RLVR = z u."""
    batch = make_batch(seed)
    teacher, old_BT = batch.view("teacher"), batch.student_logprob_BT
    assert old_BT is not None
    assert batch.reward_B is not None
    z_B1 = torch.where(batch.reward_B > 0, 1.0, -1.0).masked_fill(batch.reward_B.isnan(), 0)[:, None]
    gap_BT = (teacher.logprob_BT - old_BT).masked_fill(~(teacher.valid_BT & batch.mask_BT), 0)
    got_BT = advantages(Opdvr().build(), batch)
    torch.testing.assert_close(got_BT * z_B1, (z_B1 * gap_BT).clamp(min=0))


@given(seed=st.integers(0, 1000))
def test_opd_is_opdvr_and_what_conflicts(seed: int):
    """d_OPD = d_OPDVR + d_conflict with d_conflict = r 1[z r < 0], which is the inverse gate."""
    batch = make_batch(seed)
    assert batch.reward_B is not None
    batch = replace(batch, reward_B=batch.reward_B.nan_to_num(0.0))
    agreeing, conflicting = (advantages(Opdvr(inverse=inverse).build(), batch) for inverse in (False, True))
    torch.testing.assert_close(agreeing + conflicting, advantages(Opd().build(), batch))
    assert (agreeing * conflicting == 0).all()


@given(seed=st.integers(0, 1000))
def test_fixed_points_of_opdvr_are_a_region(seed: int):
    """Right tokens with pi >= piT and wrong ones with pi <= piT get no push."""
    batch = make_batch(seed, clean=True)
    old_BT, reward_B = batch.student_logprob_BT, batch.reward_B
    assert old_BT is not None
    assert reward_B is not None
    away_BT = torch.rand_like(old_BT) * torch.where(reward_B > 0, -1.0, 1.0)[:, None]
    teacher = replace(batch.view("teacher"), logprob_BT=old_BT + away_BT)
    got = advantages(Opdvr().build(), replace(batch, views={"teacher": teacher}))
    assert (got == 0).all()
