from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid.methods.base import ViewSpec
from hybrid.methods.grpo import Grpo
from hybrid.methods.kat import Kat
from hybrid.methods.mix import Mix, Part
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Opdvr
from hybrid.methods.rstg import Rstg
from hybrid.methods.sft import Sft
from hybrid.methods.sipo import Sipo
from hybrid.methods.va_opd import VaOpd
from hybrid.objective.schedules import Schedule
from tests.batches import Toy, advantages, kl_weights, make_batch, run


@given(seed=st.integers(0, 1000), a=st.floats(0, 2), b=st.floats(0.1, 2))
def test_a_mixture_is_linear(seed, a, b):
    batch = make_batch(seed)
    toy = Toy.near(batch)
    mixed = Mix(parts=(Part(weight=a, method=Grpo()), Part(weight=b, method=Opd(estimator="k2")))).build()
    loss = run(mixed, batch, toy)
    torch.testing.assert_close(loss.policy, a * run(Grpo().build(), batch, toy).policy)
    torch.testing.assert_close(loss.kl, b * run(Opd(estimator="k2").build(), batch, toy).kl)


@given(seed=st.integers(0, 1000))
def test_a_part_may_train_some_groups_only(seed):
    batch = make_batch(seed, groups=5)
    parts = (
        Part(method=Opd(), rows="all_wrong"),
        Part(method=Grpo(), rows="mixed"),
        Part(weight=0.5, method=VaOpd(), rows="all_right"),
    )
    method = Mix(parts=parts).build()
    got, weights = advantages(method, batch), kl_weights(method, batch)
    opd, grpo = advantages(Opd().build(), batch), advantages(Grpo().build(), batch)
    va_opd = kl_weights(VaOpd().build(), batch)
    assert batch.reward_B is not None
    for group in batch.group_B.unique():
        rows = batch.group_B == group
        scored = batch.reward_B[rows][~batch.reward_B[rows].isnan()]
        kind = "mixed" if scored.min() != scored.max() else "right" if scored.max() > 0 else "wrong"
        want = {"mixed": grpo[rows], "wrong": opd[rows], "right": 0 * opd[rows]}[kind]
        torch.testing.assert_close(got[rows], want)
        torch.testing.assert_close(weights[rows], (0.5 if kind == "right" else 0.0) * va_opd[rows])
    assert [term.credit.branches for term in method.terms] == [("all_wrong",), ("mixed",), ("all_right",)]


def test_rows_that_a_part_does_not_train_count_in_its_denominator():
    batch = make_batch(0, groups=2, clean=True)
    method = Mix(parts=(Part(method=Opd(), rows="all_wrong"),)).build()
    assignment, _ = method.assign(batch, {})
    torch.testing.assert_close(assignment.terms[0].share_BT.sum(), torch.tensor(1.0))
    assert assignment.metrics["only/all_wrong"] == (3.0, 6.0)


def test_a_routed_method_keeps_its_own_branches():
    batch = make_batch(2)
    method = Mix(parts=(Part(method=Rstg(), rows="all_wrong"),)).build()
    assert method.terms[0].credit.branches == ("all_wrong", "mixed")
    assignment, _ = method.assign(batch, {})
    assert set(assignment.terms[0].branch_B.tolist()) <= {0, -1}
    toy = Toy.near(batch)
    torch.testing.assert_close(run(method, batch, toy).sft, run(Rstg().build(), batch, toy).sft)


def test_a_part_with_a_memory_remembers_its_own_rows():
    batch = make_batch(1, clean=True)
    trap = Kat(window=1, min_samples=1, warmup_steps=0)
    method = Mix(parts=(Part(method=trap, rows="all_wrong"), Part(method=Grpo()))).build()
    _, state = method.assign(batch, method.init())
    lowest = batch.need("kl").masked_fill(~batch.mask_BT, torch.inf).min(-1).values[:3]
    assert state == {"kat/kl_minima": pytest.approx(lowest.tolist())}


def test_imitation_may_be_routed():
    batch = make_batch(0, groups=2, clean=True)
    method = Mix(parts=(Part(method=Sft(), rows="all_wrong"),)).build()
    assignment, _ = method.assign(batch, {})
    share_BU = assignment.terms[0].share_BT
    assert float(share_BU.sum()) == pytest.approx(1)
    assert (share_BU[3:] == 0).all()


def test_views_of_the_parts_are_joined():
    both = Mix(parts=(Part(method=Sipo()), Part(method=VaOpd())))
    assert both.views == {**Sipo().views, **VaOpd().views}
    assert Mix(parts=(Part(method=Grpo()), Part(method=Opdvr()))).views == {}


def test_a_view_is_scored_on_all_rows_when_one_part_wants_all():
    assert Mix(parts=(Part(method=Rstg()), Part(method=Grpo()))).views == {
        "teacher": ViewSpec(options={"rows": "all_wrong", "fail_thr": 0.0})
    }
    unlike = Mix(parts=(Part(method=Rstg()), Part(method=Rstg(fail_thr=0.5))))
    assert unlike.views == {}
    assert Mix(parts=(Part(method=Rstg()), Part(method=Opd()))).views == {}


def test_views_that_are_made_differently_are_refused():
    with pytest.raises(ValidationError, match=r"two parts want scores\.right made differently"):
        Mix(parts=(Part(method=Sipo(sync_every=5)), Part(method=Sipo(sync_every=10))))


def test_schedules_and_denominators_are_each_part_s_own():
    batch = replace(make_batch(0), step=25)
    method = Mix(
        parts=(Part(weight=Schedule(start=1.0, end=0.0, steps=100), method=Opd()), Part(weight=2.0, method=Grpo()))
    ).build()
    assignment, _ = method.assign(batch, {})
    assert [term.scale for term in assignment.terms] == [0.75, 2.0]
    assert [float(term.share_BT.sum()) for term in assignment.terms] == pytest.approx([0.75, 2.0])
