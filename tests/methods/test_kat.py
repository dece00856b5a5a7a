from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid.methods.kat import Kat
from hybrid.methods.opd import Opd
from hybrid.objective.losses import Divergence, SampledDivergence
from hybrid.types import RolloutBatch
from tests.batches import Toy, kl_weights, make_batch, numbers, plain_batch, run, view
from tests.reference import kat
from tests.reference.rows import rows_of, tensor_of

seeds = st.integers(0, 10_000)
SMALL = {"min_samples": 2, "warmup_steps": 0, "n_exempt": 0}
STATE = {"kl_minima": [0.2, 0.4, 0.5, 0.3]}


def small(**settings: Any) -> Kat:
    """KAT that is active at once and exempts nothing."""
    return Kat.model_validate(SMALL | settings)


@given(
    seed=seeds,
    window=st.integers(1, 4),
    patience=st.integers(1, 3),
    n_exempt=st.integers(0, 5),
    min_keep=st.integers(0, 3),
    wide=st.booleans(),
    exempt_trigger=st.sampled_from(["ignored", "deferred"]),
    eta=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
)
def test_cut_against_loops(seed, window, patience, n_exempt, min_keep, wide, exempt_trigger, eta):
    batch = make_batch(seed, width=10)
    stride = window if wide else 1
    method = small(
        n_exempt=n_exempt,
        window=window,
        patience=patience,
        min_keep=min_keep,
        stride=stride,
        exempt_trigger=exempt_trigger,
        eta=eta,
    )
    rows = rows_of(batch)
    failed = [[score is None for score in row.scores["teacher"]] for row in rows]
    threshold = float(torch.tensor(STATE["kl_minima"]).quantile(1 - eta))
    want = []
    for row, lost in zip(rows, failed, strict=True):
        keep = kat.cut(
            row.kl,
            threshold=threshold,
            window=window,
            patience=patience,
            n_exempt=n_exempt,
            stride=stride,
            min_keep=min_keep,
            exempt_trigger=exempt_trigger,
        )
        want.append([0.0 if any(lost) else float(t < keep) for t in range(row.length)])
    got = kl_weights(method.build(), batch, STATE)
    torch.testing.assert_close(got, tensor_of(rows, want, batch.mask_BT.shape[1]))


@given(seed=seeds, buffer=st.integers(1, 12))
def test_memory_against_loops(seed, buffer):
    method = small(window=3, patience=1, buffer=buffer).build()
    state, want = method.init(), []
    for turn in range(3):
        batch = make_batch(seed + turn, groups=2)
        _, state = method.assign(batch, state)
        rows = rows_of(batch)
        finished = [row.kl for row in rows if None not in row.scores["teacher"]]
        want = kat.remember(want, finished, window=3, buffer=buffer)
        assert state["kl_minima"] == pytest.approx(want)


def responses(kl: list[list[float]], **fields) -> RolloutBatch:
    width = max(len(row) for row in kl)
    padded = [row + [0.0] * (width - len(row)) for row in kl]
    return plain_batch(
        [len(row) for row in kl],
        student_logprob_BT=numbers([[-1.0] * width] * len(kl)),
        reverse_kl_BT=numbers(padded),
        **fields,
    )


def test_nothing_is_cut_before_enough_samples_and_steps():
    low = responses([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    method = Kat(window=2, patience=1, n_exempt=0, min_samples=3, warmup_steps=5).build()
    full = {"kl_minima": [0.5, 0.5, 0.5]}
    assert kl_weights(method, replace(low, step=5), full)[0].tolist() == [1, 1, 0, 0, 0, 0]
    assert kl_weights(method, replace(low, step=4), full).all()
    assert kl_weights(method, replace(low, step=5), {"kl_minima": [0.5, 0.5]}).all()


def test_the_threshold_comes_from_the_batches_before():
    method = Kat(window=1, patience=1, n_exempt=0, min_samples=1, warmup_steps=0, eta=0.0).build()
    batch = responses([[5.0, 1.0], [5.0, 3.0]])
    assert kl_weights(method, batch, method.init()).all()
    _, state = method.assign(batch, method.init())
    assert state["kl_minima"] == [1.0, 3.0]  # eta 0: the threshold is now the largest of them, 3
    assert kl_weights(method, batch, state).tolist() == [[1, 0], [1, 1]]


def test_a_response_shorter_than_the_window_is_neither_cut_nor_remembered():
    method = small(window=3, patience=1).build()
    batch = responses([[0.0, 0.0], [0.0, 0.0, 0.0], []])
    assert kl_weights(method, batch, STATE).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    _, state = method.assign(batch, STATE)
    assert state["kl_minima"] == [*STATE["kl_minima"], 0.0]


def test_a_cut_response_is_remembered_over_its_whole_length():
    method = small(window=1, patience=1).build()
    _, state = method.assign(responses([[1.0, 0.1, 0.7, 0.0]]), STATE)
    assert state["kl_minima"][-1] == 0.0


def test_the_exempt_span():
    kl = [[0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]]

    def kept(**changes: int | str) -> int:
        return int(kl_weights(small(window=1, patience=2, **changes).build(), responses(kl), STATE).sum())

    assert kept() == 1  # min_keep
    assert kept(min_keep=0) == 0
    assert kept(n_exempt=2) == 5  # the first run began too early; the second begins at 5
    assert kept(n_exempt=2, exempt_trigger="deferred") == 2
    assert kept(n_exempt=5, exempt_trigger="deferred") == 5
    assert kept(n_exempt=6) == 8
    assert kept(n_exempt=6, exempt_trigger="deferred") == 6  # the run from 5 on still lasts at token 6


def test_masked_out_tokens_neither_fill_nor_break_a_window():
    batch = responses([[1.0, 0.0, 9.0, 0.0, 0.0]])
    batch = replace(batch, mask_BT=torch.tensor([[True, True, False, True, True]]))
    method = small(window=2, patience=2).build()
    assert kl_weights(method, batch, STATE)[0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("reduction", ["kept_token_mean", "kept_response_mean"])
def test_endless_patience_is_plain_distillation(reduction):
    batch = make_batch(6)
    loss = run(small(window=2, patience=10**6, reduction=reduction).build(), batch, Toy.near(batch), STATE)
    mean = "token_mean" if reduction == "kept_token_mean" else "response_mean"
    want = run(Opd(estimator="reverse_kl", reduction=mean).build(), batch, Toy.near(batch))
    torch.testing.assert_close(loss.total, want.total)


def test_normalisers():
    """Kept: 1 token of KL 2, and 2 tokens of KL (1, 3): token mean 6 / 3, response mean (2 + 2) / 2."""
    batch = responses([[2.0, 0.0], [1.0, 3.0]])
    for reduction, want in (("kept_token_mean", 2.0), ("kept_response_mean", 2.0)):
        method = small(window=1, patience=1, reduction=reduction).build()
        assert run(method, batch, Toy.same(batch), STATE).kl.item() == pytest.approx(want)
    batch = responses([[2.0, 0.0], [1.0, 6.0]])
    for reduction, want in (("kept_token_mean", 3.0), ("kept_response_mean", 2.75)):
        method = small(window=1, patience=1, reduction=reduction).build()
        assert run(method, batch, Toy.same(batch), STATE).kl.item() == pytest.approx(want)


@pytest.mark.parametrize(("estimator", "kept"), [("k1", [1, 1, 0]), ("k3", [1, 1, 0])])
def test_sampled_stand_ins(estimator, kept):
    # log pS - log pT = (1, 0.5, 0): k1 = (1, 0.5, 0), k3 = (0.3679, 0.1065, 0); thresholds 0.4 and 0.1
    batch = plain_batch([3], student_logprob_BT=numbers([[-1.0] * 3]), views={"teacher": view([[-2.0, -1.5, -1.0]])})
    method = small(window=1, patience=1, estimator=estimator, eta=0.0)
    state = {"kl_minima": [0.1, 0.4]} if estimator == "k1" else {"kl_minima": [0.05, 0.1]}
    assert kl_weights(method.build(), batch, state)[0].tolist() == kept
    assignment, _ = method.build().assign(batch, state)
    assert assignment.metrics["kl_trap/estimated"] == (1.0, 1.0)
    assert method.loss() == SampledDivergence("k2")
    assert "kl" not in method.build().needs


def test_a_missing_kl_is_named_and_a_bad_one_placed():
    with pytest.raises(ValueError, match="the method needs kl, which this run does not measure"):
        Kat().build().assign(replace(make_batch(0), reverse_kl_BT=None), {"kl_minima": []})
    bad = responses([[1.0, float("nan")]])
    with pytest.raises(ValueError, match=r"kl must be finite on response tokens; got nan at index \(0, 1\)"):
        Kat().build().assign(bad, {"kl_minima": []})


def test_support_and_stride_settings():
    assert Kat().build().divergences == (Divergence("reverse_kl", "student", 64),)
    assert Kat(support="union", top_k=8).build().divergences == (Divergence("reverse_kl", "union", 8),)
    assert Kat(top_k=0).build().divergences == (Divergence("reverse_kl", "full"),)
    with pytest.raises(ValidationError, match="stride 65 is wider than window 64"):
        Kat(stride=65)


def test_metrics_tell_the_cut():
    method = small(window=1, patience=1, eta=0.0).build()
    assignment, _ = method.assign(responses([[1.0, 0.0], [1.0, 1.0]]), STATE)
    assert assignment.metrics["kl_trap/cut"] == (1.0, 2.0)
    assert assignment.metrics["kl_trap/threshold"] == (0.5, 1.0)
    assert assignment.metrics["kept/kl_trap"] == (3.0, 4.0)
