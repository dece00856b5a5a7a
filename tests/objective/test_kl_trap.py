import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.objective.kl_trap import (
    Trap,
    TrapMemory,
    TrapState,
    online_stop,
    trap_cut,
    trap_keep,
    trap_threshold,
    window_means,
)
from hybrid.objective.ranks import linear_quantile
from tests.batches import numbers
from tests.reference import kat
from tests.reference.rstg import quantile

nasty = st.lists(st.sampled_from([0.0, 0.5, 1.0, 8.0]), max_size=24)
traps = st.builds(
    Trap,
    window=st.integers(1, 4),
    patience=st.integers(1, 4),
    n_exempt=st.integers(0, 8),
    stride=st.integers(1, 4),
    min_keep=st.integers(0, 3),
    exempt_trigger=st.sampled_from(["ignored", "deferred"]),
).filter(lambda trap: trap.stride <= trap.window)
thresholds = st.sampled_from([-float("inf"), 0.0, 0.3, 0.75, 2.0, 100.0])


@settings(max_examples=200)
@given(values=nasty, trap=traps, threshold=thresholds)
def test_the_online_stop_is_the_cut_of_the_complete_response(values, trap, threshold):
    state, fired_at = TrapState(), None
    for t, value in enumerate(values):
        state, fired = online_stop(state, value, trap=trap, threshold=threshold)
        if fired:
            fired_at = t
            break
    cut = trap_cut(numbers(values), trap=trap, threshold=threshold)
    assert (len(values) if state.cut is None else min(state.cut, len(values))) == cut
    if fired_at is not None:
        # what was generated until the trigger gives the same cut, so nothing after it mattered
        assert trap_cut(numbers(values[: fired_at + 1]), trap=trap, threshold=threshold) == cut
        assert online_stop(state, 0.0, trap=trap, threshold=threshold) == (state, True)


@settings(max_examples=200)
@given(values=nasty, trap=traps, threshold=thresholds)
def test_cut_against_loops(values, trap, threshold):
    assert trap_cut(numbers(values), trap=trap, threshold=threshold) == kat.cut(
        values,
        threshold=threshold,
        window=trap.window,
        patience=trap.patience,
        n_exempt=trap.n_exempt,
        stride=trap.stride,
        min_keep=trap.min_keep,
        exempt_trigger=trap.exempt_trigger,
    )


@given(values=nasty, window=st.integers(1, 4))
def test_the_online_minimum_is_that_of_the_complete_response(values, window):
    state = TrapState()
    for value in values:
        state, _ = online_stop(state, value, trap=Trap(window=window), threshold=-float("inf"))
    want = kat.minimum(values, window)
    assert state.lowest == (float("inf") if want is None else pytest.approx(want))
    assert len(state.recent) <= window


@given(values=nasty, window=st.integers(1, 4), stride=st.integers(1, 4))
def test_window_means_against_loops(values, window, stride):
    want = [z for _, z in kat.windows(values, window, stride)]
    torch.testing.assert_close(window_means(numbers(values), window, stride), numbers(want))


@given(
    values=nasty.filter(bool),
    trap=traps,
    threshold=thresholds,
    pads=st.integers(1, 5),
    fill=st.sampled_from([0.0, 9.0]),
)
def test_padding_cannot_end_a_response(values, trap, threshold, pads, fill):
    value_BT = numbers([values + [fill] * pads])
    use_BT = torch.tensor([[True] * len(values) + [False] * pads])
    keep_BT, minima = trap_keep(value_BT, use_BT, trap=trap, threshold=threshold)
    assert int(keep_BT.sum()) == trap_cut(numbers(values), trap=trap, threshold=threshold)
    assert not (keep_BT & ~use_BT).any()
    assert minima == trap_keep(value_BT[:, : len(values)], use_BT[:, : len(values)], trap=trap, threshold=threshold)[1]


@given(values=nasty.filter(bool), trap=traps)
def test_a_higher_threshold_never_keeps_more(values, trap):
    cuts = [trap_cut(numbers(values), trap=trap, threshold=s) for s in (0.0, 0.3, 0.75, 2.0)]
    if trap.n_exempt == 0:  # with an exempt span a longer run may begin too early to count
        assert cuts == sorted(cuts, reverse=True)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0, 0.7]))
def test_quantile_against_loops_and_torch(values, q):
    got = linear_quantile(numbers(values), q)
    assert float(got) == pytest.approx(quantile(values, q), abs=1e-12)
    assert float(got) == pytest.approx(float(numbers(values).quantile(q)), abs=1e-12)


def test_a_smaller_eta_cuts_more():
    minima = [0.1, 0.2, 0.3, 0.4]
    assert trap_threshold(minima, 0.1) > trap_threshold(minima, 0.3)
    assert trap_threshold(minima, 0.0) == 0.4
    assert trap_threshold(minima, 1.0) == 0.1


def test_memory_waits_for_samples_and_steps():
    memory = TrapMemory(eta=0.5, min_samples=2, warmup_steps=3)
    assert memory.threshold([1.0], 9) == -float("inf")
    assert memory.threshold([1.0, 2.0], 2) == -float("inf")
    assert memory.threshold([1.0, 2.0], 3) == 1.5
    assert TrapMemory(min_samples=0, warmup_steps=0).threshold([], 0) == -float("inf")


def test_the_paper_s_example_online():
    values = [2, 1.8, 1.5, 1.2, 0.9, 0.5, 0.1, 0.08, 0.05, 0.04, 0.06, 0.3, 0.5]
    state = TrapState()
    fired = []
    for value in values:
        state, stop = online_stop(state, value, trap=Trap(window=3, patience=3, n_exempt=0), threshold=0.116)
        fired.append(stop)
    assert fired.index(True) == 10
    assert state.cut == 6
