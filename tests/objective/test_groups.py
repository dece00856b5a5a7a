import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.objective.groups import all_right, all_wrong, group_advantage, mixed
from tests.batches import NAN, numbers, plain_batch

nasty = st.sampled_from([0.0, 1.0, 0.1, -1.0, 1e-9, 1e6, NAN]) | st.floats(-1, 1)
rows = st.lists(st.tuples(st.integers(0, 3), nasty), min_size=1, max_size=9)


@given(rows, st.sampled_from(["none", "group", "batch"]))
def test_group_advantage_against_loops(rows, scale):
    def scored(group=None):
        return [r for g, r in rows if not np.isnan(r) and (group is None or g == group)]

    want = []
    for group, reward in rows:
        family = scored(group)
        if np.isnan(reward) or len(set(family)) == 1:
            want.append(0.0)
            continue
        spread = scored() if scale == "batch" else family
        std = np.std(spread, ddof=1) if len(spread) > 1 else 0.0
        want.append((reward - np.mean(family)) / (1.0 if scale == "none" else std + 1e-4))
    group_B, reward_B = torch.tensor([g for g, _ in rows]), numbers([r for _, r in rows])
    torch.testing.assert_close(group_advantage(reward_B, group_B, scale=scale), numbers(want))


@given(rows)
def test_advantages_of_a_group_add_up_to_zero(rows):
    group_B, reward_B = torch.tensor([g for g, _ in rows]), numbers([r for _, r in rows])
    advantage_B = group_advantage(reward_B, group_B)
    for group in group_B.unique():
        assert float(advantage_B[group_B == group].sum()) == pytest.approx(0, abs=1e-8 * float(1 + 1e6))


@pytest.mark.parametrize("value", [0.1, 0.3, 1e-17, 1 / 3])
@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(value, count):
    advantage_B = group_advantage(numbers([value] * count), torch.zeros(count, dtype=torch.long))
    assert (advantage_B == 0).all()


@pytest.mark.parametrize(
    ("rewards", "wrong", "both", "right"),
    [
        ([0, 0], True, False, False),
        ([0, 1], False, True, False),
        ([1, 1], False, False, True),
        ([-1, -1], True, False, False),
        ([0, NAN], True, False, False),
        ([NAN, NAN], False, False, False),
        ([0, -1], False, True, False),
        ([0, 1e-7], False, False, False),
        ([0.5], False, False, True),
    ],
)
def test_row_tests(rewards, wrong, both, right):
    batch = plain_batch([1] * len(rewards), reward_B=numbers(rewards))
    for row_test, want in ((all_wrong(), wrong), (mixed(), both), (all_right(), right)):
        assert row_test.test(batch).tolist() == [want] * len(rewards), row_test.name


def test_finished_rows_alone_may_decide():
    batch = plain_batch([1] * 2, reward_B=numbers([0, 1]), truncated_B=torch.tensor([False, True]))
    assert mixed().test(batch).all()
    assert all_wrong(finished_only=True).test(batch).all()
    assert all_wrong(finished_only=True).needs == {"reward", "truncated"}
