"""Where a method becomes another one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.methods.grpo import Grpo
from hybrid.methods.mix import Mix, Part
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.r2opd import R2Opd
from hybrid.methods.rstg import Rstg
from hybrid.methods.sipo import Sipo
from tests.batches import Toy, advantages, make_batch, run
from tests.reference.rows import rows_of

seeds = st.integers(0, 10_000)


def with_teacher_as_student(seed: int):
    batch = make_batch(seed)
    same = {name: replace(v, logprob_BT=batch.need("student_logprobs")) for name, v in batch.views.items()}
    return replace(batch, views=same)


@given(seed=seeds)
@pytest.mark.parametrize("other", [Opd(), Opdvr(), Opdvr(inverse=True), Grpd(u=1.0), R2Opd()])
def test_a_teacher_equal_to_the_student_leaves_plain_rl(other, seed):
    batch = with_teacher_as_student(seed)
    assert (advantages(other.build(), batch) == 0).all()
    both = Mix(parts=(Part(method=Grpo()), Part(weight=0.7, method=other)))
    torch.testing.assert_close(advantages(both.build(), batch), advantages(Grpo().build(), batch))
    torch.testing.assert_close(
        run(both.build(), batch, Toy.same(batch)).total, run(Grpo().build(), batch, Toy.same(batch)).total
    )


@given(seed=seeds, value=st.sampled_from([0.0, 0.1, 1.0, -3.0]))
@pytest.mark.parametrize("method", [Grpo(), Grpo(scale="none"), Grpo(scale="batch"), Grpd(), Grpd(grpd_variant="sign")])
def test_equal_rewards_give_no_group_advantage(method, seed, value):
    batch = make_batch(seed)
    assert batch.reward_B is not None
    batch = replace(batch, reward_B=torch.full_like(batch.reward_B, value))
    assert (advantages(method.build(), batch) == 0).all()


@given(seed=seeds)
def test_sipo_without_contrast_is_its_grpo_and_so_is_a_finished_schedule(seed):
    batch = make_batch(seed)  # step 60
    plain = advantages(Grpo(scale="none").build(), batch)
    torch.testing.assert_close(advantages(Sipo(kappa=0.0).build(), batch), plain)
    torch.testing.assert_close(advantages(Sipo(form="multiplicative").build(), batch), plain)


@given(seed=seeds)
def test_rstg_is_grpo_on_mixed_groups(seed):
    batch = make_batch(seed)
    got, plain = advantages(Rstg().build(), batch), advantages(Grpo().build(), batch)
    mixed_B = torch.tensor([bool((plain[row] != 0).any()) for row in range(len(plain))])
    torch.testing.assert_close(got[mixed_B], plain[mixed_B])


@given(seed=seeds)
def test_r2opd_at_zero_sharpness_is_opd_and_at_endless_the_gate_of_opdvr(seed):
    batch = make_batch(seed)
    torch.testing.assert_close(advantages(R2Opd(beta=0.0).build(), batch), advantages(Opd().build(), batch))
    sharp = advantages(R2Opd(beta=1e9, truncated="as_wrong").build(), batch)
    gated = advantages(Opdvr().build(), batch)
    plain = advantages(Opd().build(), batch)
    for row, gate, opd, record in zip(sharp, gated, plain, rows_of(batch), strict=True):
        if record.reward is not None and (gate != 0).any():
            torch.testing.assert_close(row, gate * opd.abs().sum() / gate.abs().sum())


@given(seed=seeds)
def test_opdvr_with_free_truncated_rows_is_opd_where_all_are(seed):
    batch = make_batch(seed)
    batch = replace(batch, truncated_B=torch.ones(len(batch.group_B), dtype=torch.bool))
    got = advantages(Opdvr(truncated="vanilla_opd").build(), batch)
    torch.testing.assert_close(got, advantages(Opd().build(), batch))
    assert (advantages(Opdvr(truncated="skip").build(), batch) == 0).all()
