from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid.methods.grpo import Grpo
from hybrid.methods.sipo import Sipo
from hybrid.methods.sipo_analytic import SipoAnalytic
from hybrid.objective.losses import Divergence
from hybrid.types import RolloutBatch
from tests.batches import NAN, Toy, advantages, make_batch, numbers, plain_batch, run, view
from tests.reference import losses, sipo
from tests.reference.rows import rows_of, tensor_of

seeds = st.integers(0, 10_000)


@given(
    seed=seeds,
    kappa=st.sampled_from([0.0, 0.5, 8.0]),
    eps=st.sampled_from([0.05, 0.2]),
    negative_only=st.booleans(),
    s=st.sampled_from([0.0, 1.0, 0.5]),
)
def test_additive_against_loops(seed, kappa, eps, negative_only, s):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = sipo.sipo(rows, kappa=kappa, eps=eps, negative_only=negative_only, s=s)
    method = Sipo(kappa=kappa, eps=eps, negative_only=negative_only, impute_group_advantage=s)
    torch.testing.assert_close(advantages(method.build(), batch), tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(
    seed=seeds,
    evidence=st.sampled_from(["contrast", "opd"]),
    negative_only=st.booleans(),
    s=st.sampled_from([0.0, 1.0]),
    all_wrong_kappa=st.sampled_from([0.0, 0.4]),
    step=st.sampled_from([0, 10, 49, 50, 80]),
)
def test_multiplicative_against_loops(seed, evidence, negative_only, s, all_wrong_kappa, step):
    all_wrong_kappa = all_wrong_kappa if evidence == "contrast" else 0.0
    batch = replace(make_batch(seed), step=step)
    rows = rows_of(batch)
    want = sipo.sipo(
        rows,
        form="multiplicative",
        kind=evidence,
        negative_only=negative_only,
        s=s,
        all_wrong_kappa=all_wrong_kappa,
        lam=0.5 * max(0, 1 - step / 50),
    )
    method = Sipo(
        form="multiplicative",
        evidence=evidence,
        negative_only=negative_only,
        impute_group_advantage=s,
        all_wrong_kappa=all_wrong_kappa,
    )
    torch.testing.assert_close(advantages(method.build(), batch), tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds, form=st.sampled_from(["additive", "multiplicative"]))
def test_the_confidence_baseline_follows_the_loops_from_batch_to_batch(seed, form):
    method = Sipo(form=form, baseline="confidence", lam_steps=1000).build()
    state, means = method.init(), {}
    for turn in range(3):
        batch = replace(make_batch(seed + turn, groups=6, width=12), step=0)
        rows = rows_of(batch)
        want = sipo.sipo(rows, form=form, baseline="confidence", means=means)
        got = advantages(method, batch, state)
        torch.testing.assert_close(got, tensor_of(rows, want, batch.mask_BT.shape[1]))
        _, state = method.assign(batch, state)
        _, means = sipo.centred(rows, [sipo.evidence(row, "contrast") for row in rows], means)
        seen = {bucket for bucket, flag in enumerate(state["confidence_seen"]) if flag}
        assert seen == set(means)
        assert all(state["confidence_mean"][bucket] == pytest.approx(value) for bucket, value in means.items())
    assert means


def test_a_bucket_needs_eight_tokens_and_moves_by_a_tenth():
    """Eight tokens of evidence 0.1 at log p = -3 make the mean 0.1; 0.3 then makes it 0.9 * 0.1 + 0.1 * 0.3 = 0.12."""
    method = Sipo(baseline="confidence").build()

    def tokens(count: int, evidence: float) -> RolloutBatch:
        return plain_batch(
            [count],
            reward_B=numbers([0]),
            student_logprob_BT=numbers([[-3.0] * count]),
            views={"right": view([[evidence - 1] * count]), "wrong": view([[-1.0] * count])},
        )

    _, state = method.assign(tokens(7, 0.1), method.init())
    assert state["confidence_seen"] == [0] * 7
    _, state = method.assign(tokens(8, 0.1), state)
    assert state["confidence_mean"][1] == pytest.approx(0.1)
    assert state["confidence_seen"] == [0, 1, 0, 0, 0, 0, 0]
    assert advantages(method, tokens(8, 0.3), state)[0, 0] == pytest.approx(0.5 * (0.3 - 0.12))


def test_loss_against_loops():
    batch = make_batch(11)
    rows, toy = rows_of(batch), Toy.near(batch)
    toy = Toy((10 * toy.theta_BT).detach(), toy.phi_BU)
    current_BT = batch.need("student_logprobs") + toy.theta_BT
    current = [[float(current_BT[i, t]) for t in row.places] for i, row in enumerate(rows)]
    want = losses.policy_token_mean(rows, sipo.sipo(rows), current, high=0.28, dual=3.0)
    assert run(Sipo().build(), batch, toy).policy.item() == pytest.approx(want)


def test_a_row_without_a_pair_keeps_its_reward_and_counts_in_the_denominator():
    batch = plain_batch(
        [2, 2],
        reward_B=numbers([1, 0]),
        student_logprob_BT=numbers([[-1.0] * 2] * 2),
        views={"right": view([[0.1] * 2] * 2, [[True] * 2, [False] * 2]), "wrong": view([[0.0] * 2] * 2)},
    )
    assignment, _ = Sipo().build().assign(batch, {})
    torch.testing.assert_close(assignment.terms[0].value_BT, numbers([[0.55, 0.55], [-0.5, -0.5]]))
    torch.testing.assert_close(assignment.terms[0].share_BT, numbers([[0.25] * 2] * 2))


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_equal_contexts_give_its_grpo(form):
    batch = make_batch(3)
    batch = replace(batch, views={**batch.views, "wrong": batch.view("right")})
    got, want = advantages(Sipo(form=form).build(), batch), advantages(Grpo(scale="none").build(), batch)
    torch.testing.assert_close(got, want)


def test_an_unscored_row_keeps_the_contrast():
    batch = plain_batch(
        [1] * 3,
        reward_B=numbers([1, 0, NAN]),
        student_logprob_BT=numbers([[-1.0]] * 3),
        views={"right": view([[-0.9]] * 3), "wrong": view([[-1.0]] * 3)},
    )
    assert advantages(Sipo().build(), batch)[:, 0].tolist() == pytest.approx([0.55, -0.45, 0.05])


def test_rounding_does_not_wake_the_guard():
    """Three rewards of 0.1 have the mean 0.10000000000000002; the contrast of 0.1 must survive."""
    batch = plain_batch(
        [1] * 3,
        reward_B=numbers([0.1] * 3),
        student_logprob_BT=numbers([[-1.0]] * 3),
        views={"right": view([[-0.9]] * 3), "wrong": view([[-1.0]] * 3)},
    )
    assert advantages(Sipo().build(), batch)[:, 0].tolist() == pytest.approx([0.05] * 3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"evidence": "opd"}, "would punish uncertain tokens"),
        ({"all_wrong_kappa": 0.1}, "belongs to form: multiplicative"),
        ({"form": "multiplicative", "evidence": "opd", "all_wrong_kappa": 0.1}, "needs evidence: contrast"),
        ({"form": "multiplicative", "evidence": "opd", "contrast_context": "auto"}, "must be answer"),
        ({"eps": 1.0}, "less than 1"),
        ({"kapa": 1.0}, "Extra inputs"),
    ],
)
def test_refused_settings(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        Sipo.model_validate(settings)


def test_views_say_how_they_are_made():
    views = Sipo(contrast_context="auto", unjudged="mode", sync_every=5).views
    assert set(views) == {"right", "wrong"}
    assert views["wrong"].scorer == "self"
    assert views["wrong"].context == "wrong"
    assert views["right"].options == {
        "contrast_context": "auto",
        "negative": "own",
        "unjudged": "mode",
        "thr": 0.5,
        "sync": "snapshot",
        "every": 5,
    }
    assert set(Sipo(form="multiplicative", evidence="opd").views) == {"right"}


@pytest.mark.parametrize(("alpha", "kind"), [(0.0, "forward_kl"), (1.0, "reverse_kl"), (0.3, "jsd")])
def test_analytic_arm_counts_only_tokens_with_a_context(alpha, kind):
    method = SipoAnalytic(alpha=alpha, beta=0.5).build()
    assert method.divergences == (Divergence(kind, "student", 100, alpha, view="right"),)
    batch = make_batch(0)
    assignment, _ = method.assign(batch, {})
    with_context = (batch.view("right").valid_BT & batch.mask_BT).sum()
    assert float(assignment.terms[1].share_BT.sum()) == pytest.approx(0.5)
    assert (assignment.terms[1].share_BT != 0).sum() == with_context
    torch.testing.assert_close(advantages(method, batch), advantages(Grpo(scale="none").build(), batch))
