"""The baselines' estimators against slow loops written from their papers, on nasty values."""

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hybrid.objective.estimators import (
    from_gap_to_go,
    gap_of,
    leave_one_out_advantage,
    overlong_penalty,
    shaped_return,
    whitened,
)
from hybrid.objective.signals import largest
from hybrid.objective.step import blank, chain
from tests.batches import NAN, make_batch, numbers

rewards = st.sampled_from([0.0, 1.0, 0.1, -2.0, NAN])
seeds = st.integers(0, 10_000)


@given(st.lists(st.tuples(st.integers(0, 2), rewards), min_size=1, max_size=9))
def test_leave_one_out_against_loops(rows):
    slow = []
    for place, (group, reward) in enumerate(rows):
        others = [r for p, (g, r) in enumerate(rows) if g == group and p != place and not math.isnan(r)]
        slow.append(0.0 if math.isnan(reward) or not others else reward - sum(others) / len(others))
    group_B = torch.tensor([group for group, _ in rows])
    assert_close(leave_one_out_advantage(numbers([r for _, r in rows]), group_B), numbers(slow))


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.3, -5.0]), st.booleans()), min_size=1, max_size=9))
def test_whitening_against_loops(entries):
    used = [value for value, use in entries if use]
    mean = sum(used) / len(used) if used else 0.0
    deviation = math.sqrt(sum((x - mean) ** 2 for x in used) / len(used)) if used else 0.0
    slow = [(value - mean) / max(deviation, 1e-4) if use else 0.0 for value, use in entries]
    got = whitened(numbers([[value for value, _ in entries]]), torch.tensor([[use for _, use in entries]]))
    assert_close(got, numbers([slow]))


@given(st.integers(0, 40), st.integers(1, 30), st.integers(1, 30))
def test_overlong_penalty_against_the_cases_of_the_paper(length: int, max_length: int, buffer: int):
    if length <= max_length - buffer:
        slow = 0.0
    elif length <= max_length:
        slow = ((max_length - buffer) - length) / buffer
    else:
        slow = -1.0
    got = overlong_penalty(numbers([length]), max_length=max_length, buffer=buffer)
    assert_close(got, numbers([slow]))


@given(seeds, st.sampled_from([None, 0.5]))
def test_shaped_returns_against_loops(seed: int, clip: float | None):
    batch = make_batch(seed)
    teacher = batch.view("teacher")
    num_rows, width = batch.mask_BT.shape
    gap = [[0.0] * width for _ in range(num_rows)]
    for row in range(num_rows):
        for place in range(width):
            if batch.mask_BT[row, place] and teacher.valid_BT[row, place]:
                value = float(teacher.logprob_BT[row, place] - batch.need("student_logprobs")[row, place])
                gap[row][place] = value if clip is None else max(-clip, min(clip, value))
    assert_close(gap_of(batch, clip), numbers(gap))
    total_B = shaped_return(coef=2.0, clip=clip).value(batch)
    for row in range(num_rows):
        scored = any(batch.mask_BT[row, t] and teacher.valid_BT[row, t] for t in range(width))
        expected = float(batch.need("reward")[row]) + 2 * sum(gap[row])
        lost = bool(batch.mask_BT[row].any()) and not scored
        assert_close(float(total_B[row]), NAN if lost else expected, equal_nan=True, rtol=1e-9, atol=1e-9)
    credit, _ = chain(from_gap_to_go(coef=2.0, clip=clip)).apply(blank(batch), batch, {})
    for row in range(num_rows):
        for place in range(width):
            scored = bool(batch.mask_BT[row, place]) and any((teacher.valid_BT & batch.mask_BT)[row])
            expected = 2 * sum(gap[row][place:]) if scored else 0.0
            assert_close(float(credit.signal_BT[row, place]), expected, rtol=1e-9, atol=1e-9)


@given(seeds, st.integers(1, 5))
def test_largest_keeps_the_first_of_equal_entries(seed: int, top_k: int):
    generator = torch.Generator().manual_seed(seed)
    value_BTK = torch.randint(0, 3, (2, 2, 4), generator=generator).double()
    keep_BTK = largest(value_BTK, top_k)
    for row in range(2):
        for place in range(2):
            values = value_BTK[row, place].tolist()
            kept = sorted(range(4), key=lambda k: (-values[k], k))[:top_k]
            assert [k for k in range(4) if keep_BTK[row, place, k]] == sorted(kept)


def test_what_the_teacher_did_not_score_is_not_shaped():
    batch = make_batch(0)
    lost = replace(batch.view("teacher"), valid_BT=torch.zeros_like(batch.mask_BT))
    total_B = shaped_return(coef=1.0).value(replace(batch, views={"teacher": lost}))
    assert total_B[batch.mask_BT.any(-1)].isnan().all()
