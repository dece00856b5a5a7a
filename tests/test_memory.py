"""The losses that read a whole vocabulary, beside dense arithmetic: the same values in a fraction of the memory."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks.memory import CASES, Inputs, Sizes, counted_bytes, step

SIZES = Sizes(rows=4, tokens=1024, hidden=32, vocab=8_000)
"""32 slices of tokens, as at full size; a tensor of all logits has 131 MB."""

OURS = [case for case in CASES if "TRL" not in case]


def test_what_is_counted_is_what_is_held_at_once():
    def hold():
        first = torch.zeros(1000)
        del first
        second, third = torch.zeros(2000), torch.zeros(3000)
        return second + 0, third

    assert counted_bytes(hold) == pytest.approx(4 * 7000, rel=0.05)


@pytest.mark.parametrize("case", OURS)
def test_a_step_needs_an_eighth_of_the_dense_one(case):
    inputs = Inputs.make(SIZES)
    (own_N, own_NH), (dense_N, dense_NH) = (step(way, inputs) for way in CASES[case])
    assert_close(own_N, dense_N, rtol=0, atol=1e-5)
    assert_close(own_NH, dense_NH, rtol=0, atol=1e-5 * float(dense_NH.abs().max()))
    own, dense = (counted_bytes(lambda way=way: step(way, inputs)) for way in CASES[case])
    assert dense > 2 * SIZES.dense_bytes
    assert own < SIZES.dense_bytes, "nothing of the size of all logits is held"
    assert own <= dense / 8
