import asyncio
import math

import numpy as np
import pytest
import torch

from hybrid.errors import RewardError
from hybrid.rewards import RewardFunction


def returning(*values):
    return RewardFunction("mine", lambda **_: list(values))


def score(reward, completions):
    return reward(prompts=["p"] * len(completions), completions=completions, completion_ids=[[1]] * len(completions))


def test_none_stays_none_and_is_not_zero():
    assert score(returning(1, None, 0, None), ["a", "b", "c", "d"]) == [1.0, None, 0.0, None]
    assert score(returning(1, None, None, None), ["a", "b", "c", "d"]) == [1.0, None, None, None]


def test_a_none_row_is_left_out_of_its_group_as_trl_reads_it():
    # TRL turns None into NaN; mean 1/2 and std sqrt(1/2) over the two scored rows; None as 0 would give 1.4997
    values = score(returning(1, None, 0, None), ["a", "b", "c", "d"])
    reward_B = np.array([math.nan if value is None else value for value in values])
    advantage_B = np.nan_to_num((reward_B - np.nanmean(reward_B)) / (np.nanstd(reward_B, ddof=1) + 1e-4))
    np.testing.assert_allclose(advantage_B, [0.7070, 0, -0.7070, 0], atol=5e-5)


def test_scalars_of_numpy_and_torch_and_booleans_are_numbers():
    values = (
        np.float32(0.5),
        np.int64(2),
        torch.tensor(0.25),
        torch.tensor(True),
        True,
        np.bool_(False),
        np.array(3.0),
    )
    assert score(returning(*values), ["a"] * 7) == [0.5, 2.0, 0.25, 1.0, 1.0, 0.0, 3.0]
    assert all(type(value) is float for value in score(returning(*values), ["a"] * 7))
    assert score(RewardFunction("mine", lambda **_: torch.tensor([0.5, 1.0])), ["a", "b"]) == [0.5, 1.0]
    assert score(RewardFunction("mine", lambda **_: (0.5 for _ in range(2))), ["a", "b"]) == [0.5, 0.5]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 1e39, 10**400, "1", [1.0], 1j, np.nan, torch.tensor([1.0]), torch.tensor(math.nan)],
)
def test_anything_else_is_an_error_that_names_reward_row_and_completion(value):
    with pytest.raises(RewardError, match=r"reward 'mine' returned .* for row 1 \(completion 'bad one'\)"):
        score(returning(0.0, value), ["fine", "bad one"])


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 0.0, 0.0)])
def test_a_wrong_number_of_values_is_an_error(values):
    with pytest.raises(RewardError, match=f"reward 'mine' returned {len(values)} values for 2 completions"):
        score(returning(*values), ["a", "b"])


@pytest.mark.parametrize("result", [None, 1.0, "ab", {"a": 1.0}])
def test_a_result_that_is_no_list_is_an_error(result):
    with pytest.raises(RewardError, match=f"reward 'mine' returned a {type(result).__name__}"):
        score(RewardFunction("mine", lambda **_: result), ["a", "b"])


def test_what_a_reward_raises_is_told_with_its_row_and_chained():
    def fragile(*, completions, answer, **_):
        return [1 / int(text) - gold for text, gold in zip(completions, answer, strict=True)]

    with pytest.raises(
        RewardError, match=r"'fragile': raised ZeroDivisionError: .*; on row 1 \(completion '0'\)"
    ) as caught:
        RewardFunction("fragile", fragile)(
            prompts=["p"] * 3, completions=["1", "0", "x"], completion_ids=[[1]] * 3, answer=[1, 1, 1]
        )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_that_only_the_whole_batch_shows_says_so():
    def together(*, completions, **_):
        if len(completions) > 1:
            raise KeyError("pairs")
        return [0.0]

    with pytest.raises(
        RewardError, match=r"raised KeyError: 'pairs'; on the batch of 2 rows, and on none of them alone"
    ):
        score(RewardFunction("together", together), ["a", "b"])


def test_an_interrupt_is_not_a_reward_error():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(RewardFunction("interrupted", interrupted), ["a"])


def test_a_missing_column_is_named_with_those_there_are():
    reward = RewardFunction("mine", lambda **_: [0.0], columns=("answer",))
    with pytest.raises(RewardError, match="needs the column 'answer', which the data set does not have; it has: gold"):
        reward(prompts=["p"], completions=["a"], completion_ids=[[1]], gold=["1"], trainer_state=None)


def test_a_coroutine_function_is_run_whether_or_not_a_loop_runs():
    async def slow(*, completions, **_):
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    async def inside():
        return score(reward, ["abc"])

    reward = RewardFunction("slow", slow)
    assert score(reward, ["a", "ab"]) == [1.0, 2.0]
    assert asyncio.run(inside()) == [3.0]
