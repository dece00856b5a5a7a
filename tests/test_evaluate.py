"""Held-out accuracy: the numbers, the same ones under a seed, and nothing disturbed on the way."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from hybrid.errors import DataError, RewardError
from hybrid.evaluate import Evaluation, Sampling, cut_behind, evaluate, scored
from tests import tiny_models

SAMPLING = Sampling(samples=4, max_completion_length=6, batch_size=8, seed=5)
EOS = tiny_models.VOCABULARY["<eos>"]


def is_one(completions, **columns):
    return [float(text == "1") for text in completions]


def unscored_where_empty(completions, **columns):
    return [None if text == "" else 1.0 for text in completions]


def ids(text, ended=True):
    return [tiny_models.VOCABULARY[c] for c in text] + [EOS] * ended


def judged(texts, rewards, sampling, prompt="x="):
    """The evaluation of given texts, `sampling.samples` to a prompt."""
    rows = [{"prompt": prompt, "answer": "1"} for _ in texts]
    return scored(rows, [ids(text) for text in texts], tiny_models.tokenizer(), rewards, sampling)


@pytest.fixture(scope="module")
def model():
    return tiny_models.model(seed=0)


def texts_of(model, sampling, num=5):
    found = evaluate(model, tiny_models.tokenizer(), tiny_models.prompts(num), [tiny_models.coin], sampling)
    return found.texts


def test_avg_and_pass_are_the_unbiased_means_over_prompts():
    # 4, 1 and 0 of 4 right: avg@4 = (1 + 1/4 + 0) / 3; pass@2 of one in four = 1 - C(3, 2) / C(4, 2) = 1/2
    texts = ["1", "1", "1", "1", "1", "2", "2", "2", "2", "2", "2", "2"]
    found = judged(texts, [is_one], Sampling(samples=4)).metrics()
    assert found["eval/avg_at_4"] == pytest.approx(5 / 12)
    assert found["eval/pass_at_1"] == pytest.approx(5 / 12)
    assert found["eval/pass_at_2"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["eval/pass_at_4"] == pytest.approx(2 / 3)
    assert found["eval/reward"] == pytest.approx(5 / 12)
    assert found["eval/response_length"] == 2  # the end token counts
    assert found["eval/truncated"] == 0


def test_an_odd_number_of_samples_has_its_own_largest_pass():
    found = judged(["1", "2", "2"], [is_one], Sampling(samples=3)).metrics()
    assert [name for name in found if "pass" in name] == ["eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_3"]
    assert found["eval/pass_at_2"] == pytest.approx(2 / 3)


def test_intervals_hold_the_means_and_the_names_of_shares():
    found = judged(["1", "1", "1", "2", "2", "2"], [is_one], Sampling(samples=2))
    intervals = found.intervals()
    assert set(intervals) == {"eval/avg_at_2", "eval/pass_at_1", "eval/pass_at_2"}
    for name, (low, high) in intervals.items():
        assert low <= found.metrics()[name] <= high


def test_rewards_are_weighted_and_success_is_what_reaches_the_mark():
    half = judged(["1", "2"], [weighted(is_one, 0.5)], Sampling(samples=2, success_at=0.5))
    assert half.reward_PK.tolist() == [[0.5, 0.0]]
    assert half.right_PK.tolist() == [[True, False]]
    assert not judged(["1", "2"], [weighted(is_one, 0.5)], Sampling(samples=2)).right_PK.any()


def weighted(reward, weight):
    def weighed(**arguments):
        return reward(**arguments)

    weighed.weight = weight
    return weighed


def test_an_unscored_response_is_counted_and_is_not_right():
    found = judged(["", "1"], [unscored_where_empty], Sampling(samples=2))
    assert np.isnan(found.reward_PK).tolist() == [[True, False]]
    assert found.right_PK.tolist() == [[False, True]]
    assert found.metrics()["eval/unscored"] == 0.5
    assert found.metrics()["eval/reward"] == 1.0
    assert np.isnan(judged(["", ""], [unscored_where_empty], Sampling(samples=2)).metrics()["eval/reward"])


def test_a_response_at_the_limit_is_truncated_unless_it_ended_there():
    rows = [{"prompt": "x="}] * 3
    given = [ids("123", ended=False), ids("12"), ids("1")]
    sampling = Sampling(samples=3, max_completion_length=3)
    found = scored(rows, given, tiny_models.tokenizer(), [is_one], sampling)
    assert found.truncated_PK.tolist() == [[True, False, False]]
    assert found.length_PK.tolist() == [[3, 3, 2]]


def test_each_of_several_end_tokens_ends_a_response_at_the_limit():
    other = tiny_models.VOCABULARY["2"]
    sampling = Sampling(samples=2, max_completion_length=2)
    rows, given = [{"prompt": "x="}] * 2, [ids("12", ended=False), ids("13", ended=False)]
    found = scored(rows, given, tiny_models.tokenizer(), [is_one], sampling, frozenset({EOS, other}))
    assert found.truncated_PK.tolist() == [[False, True]]


def test_rewards_see_the_columns_and_the_ids():
    seen = {}

    def watching(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, ids=completion_ids, answer=answer)
        return [0.0] * len(prompts)

    judged(["1", "2"], [watching], Sampling(samples=2))
    assert seen == {"prompts": ["x=", "x="], "ids": [ids("1"), ids("2")], "answer": ["1", "1"]}


def test_a_seed_gives_the_same_responses_and_another_seed_others(model):
    assert texts_of(model, SAMPLING) == texts_of(model, SAMPLING)
    assert texts_of(model, SAMPLING) != texts_of(model, Sampling(**{**SAMPLING.__dict__, "seed": 6}))


def test_the_random_numbers_of_the_training_go_on_as_if_nothing_had_been(model):
    torch.manual_seed(3)
    alone = torch.rand(4)
    torch.manual_seed(3)
    texts_of(model, SAMPLING)
    assert torch.equal(torch.rand(4), alone)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_comes_back_in_the_mode_it_was_in(training):
    model = tiny_models.model(seed=0).train(training)
    texts_of(model, SAMPLING, num=1)
    assert model.training is training


def test_greedy_responses_are_all_the_same_whatever_the_batch(model):
    greedy = {**SAMPLING.__dict__, "temperature": 0.0, "samples": 2}
    one, all_at_once = (texts_of(model, Sampling(**{**greedy, "batch_size": size})) for size in (1, 64))
    assert one == all_at_once
    assert all(first == second for first, second in one)


def test_there_is_a_row_per_prompt_and_progress_to_the_end(model):
    told = []
    found = evaluate(
        model,
        tiny_models.tokenizer(),
        tiny_models.prompts(5),
        [tiny_models.coin],
        SAMPLING,
        report=lambda done, total: told.append((done, total)),
    )
    assert isinstance(found, Evaluation)
    assert found.right_PK.shape == (5, 4)
    assert [len(texts) for texts in found.texts] == [4] * 5
    assert told == [(8, 20), (16, 20), (20, 20)]


def test_without_prompts_or_without_a_reward_there_is_nothing_to_measure(model):
    empty = Dataset.from_dict({"prompt": []})
    with pytest.raises(DataError, match="the held-out set is empty"):
        evaluate(model, tiny_models.tokenizer(), empty, [tiny_models.coin], SAMPLING)
    with pytest.raises(RewardError, match="an evaluation needs a reward"):
        evaluate(model, tiny_models.tokenizer(), tiny_models.prompts(1), [], SAMPLING)


def test_a_response_ends_with_its_first_end_token():
    assert cut_behind([4, 1, 7, 1], frozenset({1})) == [4, 1]
    assert cut_behind([4, 7], frozenset({1})) == [4, 7]
    assert cut_behind([4, 9, 1], frozenset({1, 9})) == [4, 9]
