"""What every method must satisfy. A new method joins with its defaults by its name in METHODS."""

import json
from dataclasses import fields, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid.methods import METHODS
from hybrid.methods.base import MethodConfig
from hybrid.methods.grpo import Grpo
from hybrid.methods.kat import Kat
from hybrid.methods.mix import Mix, Part
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.r2opd import R2Opd
from hybrid.methods.rstg import Rstg
from hybrid.methods.sipo import Sipo
from hybrid.methods.sipo_analytic import SipoAnalytic
from hybrid.methods.va_opd import VaOpd
from hybrid.objective.objective import Assignment, Objective
from hybrid.objective.schedules import Schedule
from hybrid.objective.step import blank
from hybrid.types import Demonstration, RolloutBatch, State, View, take_rows
from tests.batches import Toy, assignment_rows, make_batch, run


class Case(NamedTuple):
    method: MethodConfig
    state: State | None = None


TRAP = Kat(window=2, patience=1, min_samples=2, warmup_steps=0, n_exempt=0)
MINIMA: State = {"kl_minima": [0.3, 0.5, 0.6]}

CASES: dict[str, Case] = {name: Case(kind.model_validate({})) for name, kind in METHODS.items() if name != "mix"} | {
    "grpo none": Case(Grpo(scale="none")),
    "grpo batch": Case(Grpo(scale="batch")),
    "opd top-k": Case(Opd(top_k=3)),
    "opd k2": Case(Opd(estimator="k2")),
    "opd k3": Case(Opd(estimator="k3", reduction="token_mean")),
    "opd reverse": Case(Opd(estimator="reverse_kl")),
    "opd jsd": Case(Opd(estimator="jsd", top_k=3, beta=0.3)),
    "opd candidates of both": Case(Opd(top_k=2, support="intersection", candidate_weight="none")),
    "opd jsd of either": Case(Opd(estimator="jsd", top_k=2, support="union")),
    "opdvr teacher's candidates": Case(Opdvr(top_k=2, support="teacher", candidate_weight="teacher_p")),
    "opdvr candidates of both": Case(Opdvr(top_k=2, support="intersection")),
    "grpd candidates of either": Case(Grpd(top_k=2, support="union")),
    "opdvr inverse": Case(Opdvr(inverse=True)),
    "opdvr skip": Case(Opdvr(truncated="skip", reduction="token_sum")),
    "opdvr vanilla top-k": Case(Opdvr(truncated="vanilla_opd", top_k=3)),
    "opdvr clip": Case(Opdvr(ratio_clip=0.5, reduction="response_mean")),
    "grpd sign": Case(Grpd(grpd_variant="sign")),
    "grpd std": Case(Grpd(norm_by_std=True, u=0.1)),
    "sipo multiplicative": Case(Sipo(form="multiplicative", lam_steps=100, all_wrong_kappa=0.3)),
    "sipo opd": Case(Sipo(form="multiplicative", evidence="opd", lam_steps=100, negative_only=True)),
    "sipo confidence": Case(Sipo(baseline="confidence", impute_group_advantage=1.0)),
    "sipo negative": Case(Sipo(negative_only=True, kappa=5.0)),
    "sipo analytic jsd": Case(SipoAnalytic(alpha=0.5)),
    "va_opd uniform": Case(VaOpd(uniform_without_gap=True, p_v=0.5, lam=0.9, tau=0.3)),
    "va_opd reference": Case(VaOpd(full="reference", degraded="wrong")),
    "rstg response": Case(Rstg(scope="response", k_percent=34, entropy_percentile=None, scale="none")),
    "rstg pooled": Case(Rstg(sft="pooled", exclude_truncated=True)),
    "rstg in policy": Case(Rstg(sft="in_policy", finished_only=True)),
    "rstg off": Case(Rstg(sft="off")),
    "kat cutting": Case(TRAP, MINIMA),
    "kat deferred": Case(TRAP.model_copy(update={"n_exempt": 2, "exempt_trigger": "deferred", "min_keep": 0}), MINIMA),
    "kat responses": Case(TRAP.model_copy(update={"reduction": "kept_response_mean", "stride": 2}), MINIMA),
    "kat k3": Case(TRAP.model_copy(update={"estimator": "k3"}), {"kl_minima": [0.1, 0.4]}),
    "r2opd sharp": Case(R2Opd(beta=3.0, truncated="skip")),
    "mix": Case(
        Mix(
            parts=(
                Part(weight=1.0, method=Grpo()),
                Part(weight=Schedule(start=0.5, end=0.0, steps=100), method=Opdvr(truncated="skip")),
                Part(weight=0.1, method=TRAP),
            )
        ),
        {"kat/kl_minima": [0.3, 0.5, 0.6]},
    ),
}

every_method = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
seeds = st.integers(0, 10_000)
few = settings(max_examples=3)


def gradient(objective: Objective, batch: RolloutBatch, toy: Toy, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and its gradient to the student's tokens and to the demonstration's."""
    loss = run(objective, batch, toy, state).total
    by_token, by_text = torch.autograd.grad(loss, (toy.theta_BT, toy.phi_BU), allow_unused=True)
    zeros = torch.zeros_like
    return (
        loss.detach(),
        zeros(toy.theta_BT) if by_token is None else by_token,
        zeros(toy.phi_BU) if by_text is None else by_text,
    )


def test_every_method_is_here():
    assert {case.method.name for case in CASES.values()} == set(METHODS)


def mapped(record, change):
    """A frozen record with `change(field name, tensor)` for each tensor in it."""
    out = {}
    for spec in fields(record):
        value = getattr(record, spec.name)
        if isinstance(value, Tensor):
            out[spec.name] = change(spec.name, value)
        elif isinstance(value, View | Demonstration):
            out[spec.name] = mapped(value, change)
        elif spec.name == "views":
            out[spec.name] = {name: mapped(v, change) for name, v in value.items()}
    return replace(record, **out)


def padded(batch: RolloutBatch, width: int, fill: float) -> RolloutBatch:
    """The batch with `width` more positions that hold `fill`, and `fill` in every position that was padding before."""

    def change(name: str, value: Tensor) -> Tensor:
        if not (name.endswith("_BT") or name.endswith("_BTK")):
            return value
        tail = (0, width) if name.endswith("_BT") else (0, 0, 0, width)
        if value.dtype == torch.bool:
            return torch.nn.functional.pad(value, tail, value=False)
        if not value.is_floating_point():
            return torch.nn.functional.pad(value, tail, value=-1)
        out = torch.nn.functional.pad(value, tail, value=fill)
        free_BT = torch.nn.functional.pad(~batch.mask_BT, (0, width), value=True)
        return torch.where(free_BT if name.endswith("_BT") else free_BT[..., None], fill, out)

    return mapped(batch, change)


def wider(toy: Toy, width: int) -> Toy:
    return Toy(torch.nn.functional.pad(toy.theta_BT.detach(), (0, width)).requires_grad_(), toy.phi_BU)


@every_method
@pytest.mark.parametrize(("fill", "width"), [(-torch.inf, 0), (-torch.inf, 3), (torch.nan, 2), (1e4, 1)])
def test_padding_of_any_content_changes_nothing(case: Case, fill: float, width: int):
    batch, objective = make_batch(5), case.method.build()
    toy = Toy.near(batch)
    loss, by_token, by_text = gradient(objective, batch, toy, case.state)
    got_loss, got_by_token, got_by_text = gradient(objective, padded(batch, width, fill), wider(toy, width), case.state)
    torch.testing.assert_close(got_loss, loss)
    torch.testing.assert_close(got_by_token[:, : toy.theta_BT.shape[1]], by_token)
    torch.testing.assert_close(got_by_text, by_text)
    assert (got_by_token[~padded(batch, width, fill).mask_BT] == 0).all()


@every_method
@few
@given(seed=seeds, cut=st.integers(1, 8))
def test_micro_batches_and_ranks_add_up(case: Case, seed: int, cut: int):
    batch, objective = make_batch(seed), case.method.build()
    toy = Toy.near(batch)
    assignment, _ = objective.assign(batch, case.state or objective.init())
    whole, by_token, by_text = gradient(objective, batch, toy, case.state)
    order = torch.randperm(len(batch.group_B), generator=torch.Generator().manual_seed(seed))

    def part(index: Tensor) -> Tensor:
        part_batch = batch.rows(index)
        answers = toy.rows(index).answers(part_batch, objective)
        return objective.loss(assignment_rows(assignment, index), part_batch, answers).total

    total = part(order[:cut]) + part(order[cut:])
    torch.testing.assert_close(total.detach(), whole)
    got = torch.autograd.grad(total, (toy.theta_BT, toy.phi_BU), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got[0], by_token)
    torch.testing.assert_close(got[1], by_text)


@every_method
@few
@given(seed=seeds)
def test_order_of_responses_does_not_matter(case: Case, seed: int):
    # Wide enough that no two tokens tie at a bound, where order decides (RSTG's k%).
    batch, objective = make_batch(seed, groups=4, width=12), case.method.build()
    toy = Toy.near(batch)
    order = torch.randperm(len(batch.group_B), generator=torch.Generator().manual_seed(seed))
    want, _ = objective.assign(batch, case.state or objective.init())
    got, _ = objective.assign(batch.rows(order), case.state or objective.init())
    for term_want, term_got in zip(want.terms, got.terms, strict=True):
        torch.testing.assert_close(term_got.value_BT, term_want.value_BT[order])
        torch.testing.assert_close(term_got.kept_BT, term_want.kept_BT[order])
    # A demonstration is carried by the first row of its prompt, whichever that is.
    shared_BU = toy.phi_BU[0].detach().expand(toy.phi_BU.shape).clone().requires_grad_()
    toy = Toy(toy.theta_BT, shared_BU)
    torch.testing.assert_close(
        run(objective, batch.rows(order), toy.rows(order), case.state).total,
        run(objective, batch, toy, case.state).total,
    )


@every_method
@few
@given(seed=seeds)
def test_gates_only_remove_and_weights_are_not_negative(case: Case, seed: int):
    batch, objective = make_batch(seed), case.method.build()
    state = case.state or objective.init()
    for term in objective.terms:
        own = {key.split("/")[-1]: value for key, value in state.items()}
        credit, _ = term.credit.apply(blank(batch), batch, own)
        assert not (credit.gate_BT & ~batch.mask_BT).any()
        assert not (credit.gate_BT & ~credit.known_BT).any()
        assert (credit.weight_BT >= 0).all()
        assert credit.weight_BT.isfinite().all()
        assert credit.signal_BT.isfinite().all()
        assert (credit.coefficient_BT[~credit.gate_BT] == 0).all()


@every_method
def test_gradient_reaches_only_kept_student_tokens(case: Case):
    batch, objective = make_batch(1), case.method.build()
    leaves: list[Tensor] = []

    def with_gradient(name: str, value: Tensor) -> Tensor:
        if value.is_floating_point():
            value = value.clone().requires_grad_()
            leaves.append(value)
        return value

    watched = mapped(batch, with_gradient)
    assignment, _ = objective.assign(watched, case.state or objective.init())
    tensors = [v for term in assignment.terms for v in vars(term).values() if isinstance(v, Tensor)]
    assert not any(tensor.requires_grad for tensor in tensors)
    toy = Toy.near(batch)
    _, by_token, _ = gradient(objective, batch, toy, case.state)
    kept_BT = torch.stack([term.kept_BT for term in assignment.terms if term.kept_BT is not None]).any(0)
    assert (by_token[~kept_BT] == 0).all()


@every_method
def test_a_teacher_that_could_learn_does_not(case: Case):
    """What the loss itself reads (old log-probs, scores of a sampled divergence) is measured: it takes no gradient."""
    batch, objective = make_batch(1), case.method.build()
    toy = Toy.near(batch)
    answers = toy.answers(batch, objective)
    assignment, _ = objective.assign(batch, case.state or objective.init())
    scores = {
        name: replace(view, logprob_BT=view.logprob_BT.clone().requires_grad_()) for name, view in batch.views.items()
    }
    loss = objective.loss(assignment, replace(batch, views=scores), answers).total
    got = torch.autograd.grad(loss, [view.logprob_BT for view in scores.values()], allow_unused=True)
    assert all(g is None or (g == 0).all() for g in got)


def emptied(batch: RolloutBatch) -> RolloutBatch:
    no_text = replace(batch.texts(), mask_BU=torch.zeros_like(batch.texts().mask_BU))
    return replace(batch, mask_BT=torch.zeros_like(batch.mask_BT), demonstration=no_text)


@every_method
@pytest.mark.parametrize("how", ["no token", "teacher failed"])
def test_nothing_kept_is_a_zero_that_can_go_backward(case: Case, how: str):
    batch = make_batch(2)
    if how == "no token":
        batch = emptied(batch)
    else:
        lost = {n: replace(v, valid_BT=torch.zeros_like(v.valid_BT)) for n, v in batch.views.items()}
        batch = replace(
            emptied(batch), mask_BT=batch.mask_BT, views=lost, reward_B=torch.zeros_like(batch.group_B) * 0.0
        )
        if not set(case.method.build().needs) & {f"scores.{name}" for name in batch.views}:
            return  # this method asks no teacher
        if case.method.name in ("exopd",) or case.method.name == "mix":
            batch = replace(batch, reverse_kl_BT=torch.zeros_like(batch.mask_BT) * 0.0)
    toy = Toy.near(batch)
    loss = run(case.method.build(), batch, toy, case.state).total
    loss.backward()
    assert loss.isfinite()
    assert toy.theta_BT.grad is not None
    assert toy.theta_BT.grad.isfinite().all()
    if how == "no token":
        assert loss.item() == 0
        assert (toy.theta_BT.grad == 0).all()


@every_method
def test_state_survives_a_checkpoint(case: Case):
    objective = case.method.build()
    state = case.state or objective.init()
    for seed in range(3):
        batch = make_batch(seed)
        direct, direct_state = objective.assign(batch, state)
        again, again_state = objective.assign(batch, json.loads(json.dumps(state, allow_nan=False)))
        assert same(direct, again)
        assert direct_state == again_state
        state = direct_state


def same(one: Assignment, other: Assignment) -> bool:
    pairs = zip(one.terms, other.terms, strict=True)
    return all(a.value_BT.equal(b.value_BT) and a.share_BT.equal(b.share_BT) for a, b in pairs)


@pytest.mark.parametrize(
    "case",
    [
        case for name, case in CASES.items() if name != "rstg in policy"
    ],  # p / sg[p] is constant to a difference quotient
)
def test_loss_agrees_with_numeric_differentiation(case: Case):
    batch, objective = make_batch(3, groups=2, width=4), case.method.build()
    assignment, _ = objective.assign(batch, case.state or objective.init())
    near = Toy.near(batch)

    def loss(theta_BT: Tensor, phi_BU: Tensor) -> Tensor:
        return objective.loss(assignment, batch, Toy(theta_BT, phi_BU).answers(batch, objective)).total

    assert torch.autograd.gradcheck(loss, (near.theta_BT, near.phi_BU), eps=1e-7, atol=1e-5, fast_mode=True)


@every_method
def test_a_group_of_one_trains_without_nan(case: Case):
    batch = make_batch(4, groups=4, size=1, clean=True)
    toy = Toy.near(batch)
    loss, by_token, by_text = gradient(case.method.build(), batch, toy, case.state)
    assert loss.isfinite()
    assert by_token.isfinite().all()
    assert by_text.isfinite().all()


@every_method
def test_settings_survive_json(case: Case):
    assert type(case.method).model_validate_json(case.method.model_dump_json()) == case.method


@every_method
def test_every_setting_says_what_it_is(case: Case):
    spec = type(case.method).model_fields
    assert all(field.description for name, field in spec.items() if name != "name")
    assert case.method.formula
    assert case.method.paper


def test_take_rows_cuts_every_tensor():
    batch = make_batch(0)
    few = take_rows(batch, torch.tensor([4, 0]))
    assert few.group_B.tolist() == [1, 0]
    assert few.view("teacher").logprob_BT.equal(batch.view("teacher").logprob_BT[[4, 0]])
    assert few.texts().mask_BU.equal(batch.texts().mask_BU[[4, 0]])
