"""What a step costs beyond TRL's: that credit takes no more operations for more tokens, and the timing itself."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.credit import SETTINGS, growth, made_batch
from benchmarks.step import KINDS, Turns, Work, interval, run_steps
from hybrid.methods import METHODS, method_of


class Operations(TorchDispatchMode):
    """Counts tensor operations, and the largest tensor that one of them makes."""

    def __init__(self):
        super().__init__()
        self.number = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.number += 1
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("name", METHODS)
def test_more_tokens_take_larger_operations_and_not_more_of_them(name):
    """Each is linear in its tensor, and makes a few numbers a token at most; KAT goes row by row."""
    counts = []
    for rows, tokens in ((16, 80), (16, 320), (64, 80)):
        objective = method_of({"name": name, **SETTINGS.get(name, {})}).build()
        batch = made_batch(rows, tokens)
        with Operations() as seen:
            objective.assign(batch, objective.init())
        counts.append(seen.number)
        assert seen.largest <= max(2 * rows * tokens + 64 * rows, 64 * tokens)  # a window of 64 of each row in turn
    assert counts[1] <= (1.5 if name == "kat" else 1) * counts[0]  # rows that are shorter than KAT's window take fewer
    assert counts[2] <= 4 * counts[0]


def test_trainings_take_turns_there_and_back():
    turns = Turns(3)
    order = []
    for _ in range(9):
        order.append(turns._whose())
        turns.done()
    assert order == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_an_interval_of_a_constant_ratio_has_no_width():
    first = np.array([1.0, 2.0, 4.0, 8.0])
    assert interval(first, 1.5 * first) == pytest.approx((1.5, 1.5, 1.5))
    assert growth([1, 2, 8], [5.0, 3.0, 48.0]) == pytest.approx(2.0)


def test_all_trainings_do_the_same_work(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # responses that are given, not generated
    work = Work(rows=8, tokens=16, hidden=32, layers=1, vocab=64, rounds=2, warmup=1)
    steps = run_steps(work)
    assert all(len(steps.cpu_s[kind]) == len(steps.wall_s[kind]) == 2 for kind in KINDS)
    stock = [(entry["loss"], entry["grad_norm"]) for entry in steps.logs["stock"]]
    assert len(stock) == 3
    assert any(loss != 0 for loss, _ in stock)
    for kind in ("trl head", "ours"):
        for want, entry in zip(stock, steps.logs[kind], strict=True):
            assert (entry["loss"], entry["grad_norm"]) == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert steps.logs["opdvr"][0]["teacher/rows"] == 8
