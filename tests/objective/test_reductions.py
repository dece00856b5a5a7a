from dataclasses import replace

import pytest
import torch

from hybrid.objective import reductions
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import objective
from hybrid.objective.reductions import Reduction
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import blank, chain
from hybrid.types import Credit, RolloutBatch
from tests.batches import numbers, plain_batch, view


@pytest.fixture
def batch() -> RolloutBatch:
    """Lengths 3, 1 and 0 of one prompt, 2 of another; the teacher failed on the last."""
    valid = [[True] * 3] * 3 + [[False] * 3]
    return plain_batch(
        [3, 1, 0, 2],
        group=[0, 0, 0, 1],
        reward_B=numbers([1, 0, 0, 1]),
        student_logprob_BT=numbers([[-1.0] * 3] * 4),
        views={"teacher": view([[-1.0] * 3] * 4, valid)},
    )


def credit(batch: RolloutBatch, *steps) -> Credit:
    return chain(*(steps or (from_teacher_gap(),))).apply(blank(batch), batch, {})[0]


def rows(reduction: Reduction, batch: RolloutBatch, credit: Credit) -> list[list[float]]:
    return reduction.share(credit, batch).tolist()


def test_token_mean_counts_known_tokens_gated_or_not(batch):
    known = credit(batch)
    assert rows(reductions.token_mean(), batch, known) == [[0.25] * 3, [0.25, 0, 0], [0] * 3, [0] * 3]
    closed = replace(known, gate_BT=torch.zeros_like(known.gate_BT))
    assert rows(reductions.token_mean(), batch, closed) == rows(reductions.token_mean(), batch, known)


def test_kept_token_mean_counts_open_gates(batch):
    known = credit(batch)
    gate_BT = torch.zeros_like(known.gate_BT)
    gate_BT[0, :2] = True
    kept = replace(known, gate_BT=gate_BT)
    assert rows(reductions.kept_token_mean(), batch, kept) == [[0.5, 0.5, 0]] + [[0] * 3] * 3


def test_response_mean_counts_empty_responses_and_leaves_lost_ones(batch):
    got = reductions.response_mean().share(credit(batch), batch)
    torch.testing.assert_close(got, numbers([[1 / 9] * 3, [1 / 3, 0, 0], [0] * 3, [0] * 3]))
    with_reward = reductions.response_mean().share(credit(batch, from_group_advantage()), batch)
    torch.testing.assert_close(with_reward, numbers([[1 / 12] * 3, [1 / 4, 0, 0], [0] * 3, [1 / 8, 1 / 8, 0]]))


def test_kept_response_mean(batch):
    known = credit(batch)
    kept = replace(known, gate_BT=known.gate_BT & torch.tensor([True, False, True]))
    got = reductions.response_mean(kept=True).share(kept, batch)
    torch.testing.assert_close(got, numbers([[1 / 6, 0, 1 / 6], [1 / 3, 0, 0], [0] * 3, [0] * 3]))


def test_sums_over_responses_and_prompts_leave_lost_ones(batch):
    assert rows(reductions.token_sum(), batch, credit(batch))[0] == pytest.approx([1 / 3] * 3)
    assert rows(reductions.prompt_mean(), batch, credit(batch))[0] == [1.0] * 3
    assert rows(reductions.prompt_mean(), batch, credit(batch, from_group_advantage()))[0] == [0.5] * 3


def test_length_constant(batch):
    reward = credit(batch, from_group_advantage())
    assert rows(reductions.length_constant(10), batch, reward)[3] == [0.025, 0.025, 0]
    assert rows(reductions.length_constant(), replace(batch, max_length=5), reward)[3] == [0.05, 0.05, 0]
    with pytest.raises(ValueError, match="needs the limit on response tokens; set max_length"):
        reductions.length_constant().share(reward, batch)


def test_nothing_to_count_is_a_share_of_zero(batch):
    empty = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    for reduction in (
        reductions.token_mean(),
        reductions.kept_token_mean(),
        reductions.token_sum(),
        reductions.response_mean(),
        reductions.prompt_mean(),
        reductions.length_constant(4),
    ):
        assert (reduction.share(credit(empty), empty) == 0).all(), reduction.name


def test_an_objective_of_lost_rows_is_zero(batch):
    lost = replace(batch, views={"teacher": view([[0.0] * 3] * 4, [[False] * 3] * 4)})
    method = objective(
        name="test", credit=chain(from_teacher_gap()), loss=PolicyLoss(), reduction=reductions.token_mean()
    )
    assignment, _ = method.assign(lost, {})
    assert (assignment.terms[0].share_BT == 0).all()
    assert (assignment.terms[0].value_BT == 0).all()
