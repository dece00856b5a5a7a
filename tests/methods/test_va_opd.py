from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid.methods.va_opd import VaOpd
from hybrid.objective.losses import Divergence
from tests.batches import Toy, kl_weights, make_batch, numbers, plain_batch, run, view
from tests.reference import losses, va_opd
from tests.reference.rows import rows_of, tensor_of

seeds = st.integers(0, 10_000)


@given(
    seed=seeds,
    tau=st.sampled_from([0.1, 1.0, 5.0]),
    p_v=st.sampled_from([0.05, 0.2, 0.5, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
    uniform=st.booleans(),
)
def test_coefficients_against_loops(seed, tau, p_v, lam, uniform):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = va_opd.coefficients(rows, tau=tau, p_v=p_v, lam=lam, uniform=uniform)
    method = VaOpd(tau=tau, p_v=p_v, lam=lam, uniform_without_gap=uniform)
    torch.testing.assert_close(kl_weights(method.build(), batch), tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds)
def test_loss_is_the_mean_over_prompts(seed):
    batch = make_batch(seed)
    rows = rows_of(batch)
    want = losses.prompt_mean(rows, va_opd.coefficients(rows), [row.kl for row in rows])
    got = run(VaOpd().build(), batch, Toy.same(batch))
    assert got.kl.item() == pytest.approx(want)


@given(seed=seeds)
def test_the_weight_of_a_prompt_is_one(seed):
    batch = make_batch(seed)
    total_BT = kl_weights(VaOpd().build(), batch)
    scored_BT = batch.view("teacher").valid_BT & batch.view("degraded").valid_BT & batch.mask_BT
    for group in batch.group_B.unique():
        rows = batch.group_B == group
        assert float(total_BT[rows].sum()) == pytest.approx(1.0 if scored_BT[rows].any() else 0.0)


def group(full, degraded, lengths=None, **fields):
    lengths = [len(row) for row in full] if lengths is None else lengths
    return plain_batch(
        lengths,
        student_logprob_BT=numbers([[-1.0] * len(full[0])] * len(full)),
        reverse_kl_BT=numbers([[1.0] * len(full[0])] * len(full)),
        views={"teacher": view(full), "degraded": view(degraded)},
        **fields,
    )


def test_equal_gaps_weigh_siblings_alike_and_still_split_tokens():
    got = kl_weights(VaOpd().build(), group([[-1.0] * 5] * 2, [[-2.0] * 5] * 2))
    torch.testing.assert_close(got, 0.5 * numbers([[0.5, 0.125, 0.125, 0.125, 0.125]] * 2))


def test_without_any_gap_the_first_tokens_are_high_or_all_alike():
    batch = group([[-2.0] * 10], [[-1.0] * 10])
    got = kl_weights(VaOpd().build(), batch)
    torch.testing.assert_close(got, numbers([[0.25] * 2 + [0.0625] * 8]))
    even = kl_weights(VaOpd(uniform_without_gap=True).build(), batch)
    torch.testing.assert_close(even, numbers([[0.1] * 10]))


def test_one_token_takes_the_whole_response():
    got = kl_weights(VaOpd().build(), group([[-1.0]], [[-2.0]]))
    torch.testing.assert_close(got, numbers([[1.0]]))


def test_an_empty_response_leaves_its_weight_to_its_siblings():
    three = group([[-1, -1], [-1, -1], [-1, -1]], [[-2, -1], [-4, -1], [-9, -9]], lengths=[2, 2, 0])
    two = three.rows(slice(0, 2))
    torch.testing.assert_close(kl_weights(VaOpd().build(), three)[:2], kl_weights(VaOpd().build(), two))
    with pytest.raises(ValueError, match=r"response 2 has no token.*drop_empty: true"):
        kl_weights(VaOpd(drop_empty=False).build(), three)
    torch.testing.assert_close(kl_weights(VaOpd(drop_empty=False).build(), two), kl_weights(VaOpd().build(), two))


def test_a_prompt_whose_teacher_failed_leaves_the_mean():
    batch = group([[-1, -1]] * 2, [[-2, -1]] * 2, group=[0, 1])
    valid_BT = torch.tensor([[True, True], [False, False]])
    batch = replace(batch, views={**batch.views, "teacher": replace(batch.view("teacher"), valid_BT=valid_BT)})
    assert run(VaOpd().build(), batch, Toy.same(batch)).kl.item() == pytest.approx(1.0)


def test_any_two_views_will_do():
    method = VaOpd(full="document", degraded="blanked")
    assert method.build().divergences == (Divergence("reverse_kl", view="document"),)
    assert {name: spec.context for name, spec in method.views.items()} == {
        "document": "document",
        "blanked": "blanked",
    }
    batch = group([[-1.0] * 5] * 2, [[-2.0] * 5] * 2)
    renamed = replace(batch, views={"document": batch.view("teacher"), "blanked": batch.view("degraded")})
    torch.testing.assert_close(kl_weights(method.build(), renamed), kl_weights(VaOpd().build(), batch))
    with pytest.raises(ValueError, match=r"needs scores\.document"):
        kl_weights(method.build(), batch)


def test_one_view_twice_is_refused():
    with pytest.raises(ValidationError, match="no token would have a view gap"):
        VaOpd(full="teacher", degraded="teacher")


def test_the_image_is_degraded_by_a_setting():
    assert VaOpd(degraded_ratio=0.2).views["degraded"].options == {"ratio": 0.2}
    assert set(VaOpd().views) == {"degraded"}
