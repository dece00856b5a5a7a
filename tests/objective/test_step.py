from dataclasses import replace

import pytest
import torch

from hybrid.errors import HybridError, MissingMeasurement
from hybrid.methods.kat import Kat
from hybrid.methods.opd import Opd
from hybrid.objective.gates import keep_outcome_agreeing
from hybrid.objective.groups import all_wrong, mixed
from hybrid.objective.losses import PolicyLoss
from hybrid.objective.objective import mix, objective
from hybrid.objective.reductions import token_mean
from hybrid.objective.schedules import Schedule
from hybrid.objective.signals import from_group_advantage, from_teacher_gap
from hybrid.objective.step import Signal, blank, chain, gate, route, signal, weight
from hybrid.objective.weights import weight_by_schedule
from tests.batches import NAN, advantages, make_batch, numbers, plain_batch, view


@pytest.fixture
def batch():
    return plain_batch(
        [2] * 4,
        group=[0, 0, 1, 1],
        reward_B=numbers([0, 0, 1, 0]),
        student_logprob_BT=numbers([[-1.0, -2.0]] * 4),
        views={"teacher": view([[-0.5, -3.0]] * 4)},
    )


def policy(credit):
    return objective(name="test", credit=credit, loss=PolicyLoss(), reduction=token_mean())


def test_a_need_of_no_measurement_is_refused_with_the_nearest():
    step = weight("mine", lambda credit, batch: batch.need("entropy"), needs=["entropy"])
    with pytest.raises(
        MissingMeasurement, match=r"no measurement 'entropy'; did you mean entropies\? There are reward,"
    ):
        policy(chain(from_teacher_gap(), step))


def test_a_forgotten_need_of_no_measurement_is_told_when_it_is_read(batch):
    credit = chain(from_teacher_gap(), weight("mine", lambda credit, batch: batch.need("rewards")))
    with pytest.raises(MissingMeasurement, match="no measurement 'rewards'; did you mean reward"):
        advantages(policy(credit), batch)


def test_a_value_for_each_response_is_not_spread_over_the_tokens():
    """Four responses of four tokens: it would fit along either axis."""
    square = make_batch(groups=2, size=2, width=4, clean=True)
    per_response = {
        "signal": chain(signal("mine", lambda batch: Signal(batch.reward_B, batch.mask_BT), ["reward"])),
        "gate": chain(from_teacher_gap(), gate("mine", lambda credit, batch: batch.reward_B > 0)),
        "weight": chain(from_teacher_gap(), weight("mine", lambda credit, batch: batch.reward_B)),
    }
    for kind, credit in per_response.items():
        with pytest.raises(
            HybridError, match=rf"{kind} 'mine': .* of shape \(4, 4\) \[responses, tokens\]; got \(4,\)"
        ):
            advantages(policy(credit), square)


def test_a_chain_refuses_a_signal_after_a_gate():
    with pytest.raises(
        ValueError,
        match="step 'gap' is a signal and stands after 'outcome_agrees', a gate; the order is signals, gates",
    ):
        chain(keep_outcome_agreeing(), from_teacher_gap())


def test_a_chain_refuses_a_gate_after_a_weight():
    with pytest.raises(ValueError, match="'outcome_agrees' is a gate and stands after 'schedule', a weight"):
        chain(from_teacher_gap(), weight_by_schedule(0.5), keep_outcome_agreeing())


def test_an_empty_chain_and_an_empty_route_are_refused():
    with pytest.raises(ValueError, match="at least one step"):
        chain()
    with pytest.raises(ValueError, match="at least one"):
        route()
    with pytest.raises(ValueError, match="at least one"):
        mix()


def test_signals_add_up(batch):
    got = advantages(policy(chain(from_group_advantage(), from_teacher_gap(scale=0.1))), batch)
    torch.testing.assert_close(got, numbers([[0.05, -0.1]] * 2 + [[0.55, 0.4], [-0.45, -0.6]]))


def test_a_signal_is_added_where_it_is_known(batch):
    """A failed teacher row keeps its reward signal."""
    views = {"teacher": replace(batch.view("teacher"), valid_BT=torch.zeros(4, 2, dtype=torch.bool))}
    got = advantages(policy(chain(from_group_advantage(), from_teacher_gap())), replace(batch, views=views))
    torch.testing.assert_close(got, numbers([[0.0] * 2] * 2 + [[0.5] * 2, [-0.5] * 2]))


def test_route_gives_each_row_its_first_branch(batch):
    both = route((all_wrong(), chain(from_teacher_gap())), (mixed(), from_group_advantage()))
    got = advantages(policy(both), batch)
    torch.testing.assert_close(got, numbers([[0.5, -1.0]] * 2 + [[0.5] * 2, [-0.5] * 2]))
    first = route((mixed(), from_group_advantage()), (mixed(), from_teacher_gap()))
    credit, _ = first.apply(blank(batch), batch, {})
    assert credit.branch_B.tolist() == [-1, -1, 0, 0]
    assert not credit.gate_BT[:2].any()
    assert credit.known_BT.all()  # a row without a branch still counts in the denominator
    assert first.needs == {"reward", "scores.teacher", "student_logprobs"}
    assert credit.metrics["route/mixed"] == (0.0, 4.0)


def test_route_noting_and_phase(batch):
    """A route stands where a whole chain stands."""
    with pytest.raises(ValueError, match="the order is"):
        chain(route((mixed(), from_group_advantage())), from_teacher_gap())


def test_a_negative_or_infinite_weight_is_an_error(batch):
    for bad in (-0.5, float("inf"), NAN):
        step = weight("bad", lambda credit, b, bad=bad: torch.full_like(credit.weight_BT, bad))
        with pytest.raises(ValueError, match=r"weight 'bad' must be finite and >= 0; got .* at index \(0, 0\)"):
            advantages(policy(chain(from_teacher_gap(), step)), batch)


def test_two_states_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two steps keep a state called 'kl_minima'"):
        mix((1.0, Kat().build()), (1.0, Kat().build()))


def test_states_of_different_methods_stand_side_by_side():
    method = mix((1.0, Opd().build()), (1.0, Kat(window=2).build()))
    _, state = method.assign(make_batch(0), method.init())
    assert set(state) == {"kat/kl_minima"}
    assert state["kat/kl_minima"]


def test_a_foreign_state_is_carried_along():
    _, state = Opd().build().assign(make_batch(0), {"other": [1.0]})
    assert state == {"other": [1.0]}


@pytest.mark.parametrize(("step", "want"), [(0, 1.0), (5, 0.5), (10, 0.0), (99, 0.0)])
def test_mix_is_linear_in_scheduled_weights(batch, step, want):
    batch = replace(batch, step=step)
    parts = policy(chain(from_group_advantage())), policy(chain(from_teacher_gap()))
    got = advantages(mix((2.0, parts[0]), (Schedule(start=1.0, end=0.0, steps=10), parts[1])), batch)
    torch.testing.assert_close(got, 2 * advantages(parts[0], batch) + want * advantages(parts[1], batch))


def test_a_missing_measurement_is_named(batch):
    with pytest.raises(ValueError, match="the method needs reward, which this run does not measure"):
        advantages(policy(chain(from_group_advantage())), replace(batch, reward_B=None))
    with pytest.raises(
        ValueError, match=r"needs scores.teacher, which this run does not measure \(it has scores.right"
    ):
        advantages(policy(chain(from_teacher_gap())), replace(batch, views={"right": batch.view("teacher")}))
