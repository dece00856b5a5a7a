"""Whose most likely tokens the candidates of the top-k mode are."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from hybrid.collect import Plan
from hybrid.errors import ConfigError
from hybrid.methods import method_of
from hybrid.methods.base import MethodConfig
from hybrid.methods.mix import Mix, Part
from hybrid.methods.opd import Opd
from hybrid.methods.opdvr import Grpd, Opdvr
from hybrid.methods.random_cut import RandomCut
from hybrid.objective.losses import Divergence, StudentPass
from hybrid.objective.step import Candidates
from hybrid.types import RolloutBatch, View
from tests.batches import F64, numbers, plain_batch, view
from tests.reference.candidates import candidate_gaps, candidates, likeliest

SUPPORTS = ["student", "teacher", "intersection", "union"]
WEIGHTINGS = ["student_p", "teacher_p", "none"]
VOCABULARY = 6


def log_softmax(generator: torch.Generator, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, VOCABULARY, generator=generator, dtype=F64).log_softmax(-1)


def listed(log_BTV: Tensor, ids: list[list[int]], width: int) -> View:
    """A scorer's log-probs of some ids at each token, filled up with padding."""
    ids_BTK = torch.full((1, len(ids), width), -1)
    top_BTK = torch.full((1, len(ids), width), -torch.inf, dtype=F64)
    for t, own in enumerate(ids):
        for k, v in enumerate(own):
            ids_BTK[0, t, k], top_BTK[0, t, k] = v, log_BTV[0, t, v]
    return replace(view([[-1.0] * len(ids)]), top_ids_BTK=ids_BTK, top_logprob_BTK=top_BTK)


def batch_of(student_BTV: Tensor, teacher_BTV: Tensor, own: list[list[int]], theirs: list[list[int]]) -> RolloutBatch:
    width = max(1, *(len(ids) for ids in own + theirs))
    return plain_batch(
        [len(own)],
        reward_B=numbers([1.0]),
        student_logprob_BT=torch.full((1, len(own)), -1.0, dtype=F64),
        views={"student": listed(student_BTV, own, width), "teacher": listed(teacher_BTV, theirs, width)},
    )


def measured(student_BTV: Tensor, teacher_BTV: Tensor, support: str, top_k: int) -> RolloutBatch:
    """What a run measures: both sides on the same ids, or each side's own list for what both have."""
    pairs = list(zip(student_BTV[0].tolist(), teacher_BTV[0].tolist(), strict=True))
    if support == "intersection":
        own, theirs = ([likeliest(pair[side], top_k) for pair in pairs] for side in (0, 1))
    else:
        own = theirs = [candidates(*pair, support, top_k) for pair in pairs]
    return batch_of(student_BTV, teacher_BTV, own, theirs)


def by_id(batch: RolloutBatch, method: MethodConfig, token: int) -> dict[int, float]:
    """The signal of each candidate that is not 0."""
    objective = method.build()
    assignment, _ = objective.assign(batch, objective.init())
    value_BTK, ids_BTK = assignment.terms[0].candidate_BTK, batch.views["student"].top_ids_BTK
    assert value_BTK is not None
    assert ids_BTK is not None
    assert value_BTK.isfinite().all()
    pairs = zip(ids_BTK[0, token].tolist(), value_BTK[0, token].tolist(), strict=True)
    return {v: value for v, value in pairs if value != 0}


@given(
    seed=st.integers(0, 10_000),
    support=st.sampled_from(SUPPORTS),
    top_k=st.integers(1, VOCABULARY),
    weighting=st.sampled_from(WEIGHTINGS),
    ratio_clip=st.sampled_from([None, 0.5]),
)
def test_every_set_against_loops(seed, support, top_k, weighting, ratio_clip):
    generator = torch.Generator().manual_seed(seed)
    student_BTV, teacher_BTV = log_softmax(generator, 3), log_softmax(generator, 3)
    method = Opd(top_k=top_k, support=support, candidate_weight=weighting, ratio_clip=ratio_clip)
    everything = [torch.randperm(VOCABULARY, generator=generator).tolist() for _ in range(3)]
    others = [ids[::-1] for ids in everything] if support == "intersection" else everything
    exact = measured(student_BTV, teacher_BTV, support, top_k)
    wide = batch_of(student_BTV, teacher_BTV, everything, others)
    for token in range(3):
        want = candidate_gaps(
            student_BTV[0, token].tolist(),
            teacher_BTV[0, token].tolist(),
            support,
            top_k,
            weighting=weighting,
            ratio_clip=ratio_clip,
        )
        assert by_id(exact, method, token) == pytest.approx(want)
        assert by_id(wide, method, token) == pytest.approx(want)


# ids 0 to 3: the student's top 2 are 0 and 1, the teacher's are 1 and 2
P, Q = [0.5, 0.3, 0.1, 0.1], [0.05, 0.6, 0.25, 0.1]


@pytest.mark.parametrize(
    ("support", "weighting", "want"),
    [
        ("student", "student_p", {0: 5 / 8 * math.log(0.1), 1: 3 / 8 * math.log(2)}),
        ("teacher", "student_p", {1: 3 / 4 * math.log(2), 2: 1 / 4 * math.log(2.5)}),
        ("intersection", "student_p", {1: math.log(2)}),
        ("union", "student_p", {0: 5 / 9 * math.log(0.1), 1: 3 / 9 * math.log(2), 2: 1 / 9 * math.log(2.5)}),
        ("union", "teacher_p", {0: 5 / 90 * math.log(0.1), 1: 60 / 90 * math.log(2), 2: 25 / 90 * math.log(2.5)}),
        ("intersection", "none", {1: math.log(2)}),
    ],
)
def test_every_set_by_hand(support, weighting, want):
    student_BTV, teacher_BTV = numbers([[P]]).log(), numbers([[Q]]).log()
    batch = measured(student_BTV, teacher_BTV, support, 2)
    assert by_id(batch, Opd(top_k=2, support=support, candidate_weight=weighting), 0) == pytest.approx(want)
    raised = {v: value for v, value in want.items() if value > 0}  # the outcome is right, so nothing is lowered
    assert by_id(batch, Opdvr(top_k=2, support=support, candidate_weight=weighting), 0) == pytest.approx(raised)


def gradient(batch: RolloutBatch, method: MethodConfig) -> tuple[float, Tensor]:
    """Loss at the old policy, and its gradient to the live log-probs of the candidates."""
    objective = method.build()
    assignment, _ = objective.assign(batch, objective.init())
    own_BTK = batch.views["student"].top_logprob_BTK
    assert own_BTK is not None
    live_BTK = own_BTK.masked_fill(own_BTK == -torch.inf, 0).requires_grad_()  # 0 at padding, as the forward gives it
    student = StudentPass(logprob_BT=batch.need("student_logprobs"), candidate_logprob_BTK=live_BTK)
    loss = objective.loss(assignment, batch, student).total
    (by_candidate_BTK,) = torch.autograd.grad(loss, live_BTK)
    return loss.item(), by_candidate_BTK


def test_a_token_without_common_candidates_trains_nothing_and_counts():
    """Token 0 has id 1 in common, token 1 nothing: half of token 0's loss is left."""
    student_BTV = numbers([[P, [0.4, 0.4, 0.1, 0.1]]]).log()
    teacher_BTV = numbers([[Q, [0.1, 0.1, 0.3, 0.5]]]).log()
    batch = measured(student_BTV, teacher_BTV, "intersection", 2)
    for weighting in WEIGHTINGS:
        loss, by_candidate_BTK = gradient(batch, Opd(top_k=2, support="intersection", candidate_weight=weighting))
        assert loss == pytest.approx(-math.log(2) / 2)
        # the student's list is 0, 1 at token 0
        assert by_candidate_BTK.tolist() == [[[0, pytest.approx(-math.log(2) / 2)], [0, 0]]]


def test_the_gradient_goes_to_each_candidate_of_the_set():
    batch = measured(numbers([[P]]).log(), numbers([[Q]]).log(), "union", 2)
    _, by_candidate_BTK = gradient(batch, Opd(top_k=2, support="union"))
    want = [-5 / 9 * math.log(0.1), -3 / 9 * math.log(2), -1 / 9 * math.log(2.5)]
    assert by_candidate_BTK[0, 0].tolist() == pytest.approx(want)


def test_a_failed_teacher_row_is_not_known():
    batch = measured(numbers([[P]]).log(), numbers([[Q]]).log(), "intersection", 2)
    lost = replace(batch.views["teacher"], valid_BT=torch.zeros(1, 1, dtype=torch.bool))
    batch = replace(batch, views={**batch.views, "teacher": lost})
    assignment, _ = Opdvr(top_k=2, support="intersection").build().assign(batch, {})
    assert assignment.terms[0].share_BT.tolist() == [[0.0]]
    assert assignment.metrics["gap/mean"] == (0.0, 0.0)


@pytest.mark.parametrize("estimator", ["reverse_kl", "forward_kl", "jsd"])
def test_a_divergence_on_what_both_share_is_refused(estimator):
    with pytest.raises(ValidationError, match=f"{estimator} on the intersection would move what only one side holds"):
        Opd(estimator=estimator, top_k=8, support="intersection")


def plan(*methods: MethodConfig) -> Plan:
    if len(methods) == 1:
        return Plan.of(methods[0].build())
    return Plan.of(Mix(parts=tuple(Part(method=method_of(m.model_dump())) for m in methods)).build())


@pytest.mark.parametrize(
    ("method", "top_k", "teacher_top_k", "distribution"),
    [
        (Opdvr(), 0, 0, False),
        (Opdvr(top_k=4), 4, 0, True),
        (Grpd(top_k=4, support="teacher"), 4, 4, False),
        (Opd(top_k=4, support="intersection"), 4, 4, False),
        (Opd(top_k=4, support="union"), 4, 0, True),
        (Opd(estimator="forward_kl", top_k=4, support="teacher"), 0, 4, False),
        (Opd(estimator="jsd", top_k=4, support="union"), 4, 0, True),
        (RandomCut(top_k=4, support="union"), 4, 0, True),
    ],
)
def test_what_is_asked_for_a_set(method, top_k, teacher_top_k, distribution):
    asked = plan(method)
    assert (asked.top_k, asked.teacher_top_k, asked.distribution) == (top_k, teacher_top_k, distribution)


def test_a_part_of_a_mixture_keeps_its_candidates():
    mixed = plan(Opdvr(top_k=4, support="teacher"), Grpd(top_k=6, support="teacher"))
    assert mixed.candidates == {Candidates("teacher", 4), Candidates("teacher", 6)}
    assert (mixed.top_k, mixed.teacher_top_k) == (6, 6)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ((Opdvr(top_k=4), Grpd(top_k=4, support="teacher")), "most likely tokens of one support.* student and teacher"),
        ((Opdvr(top_k=4), Opd(estimator="forward_kl", top_k=4, support="teacher")), "student and teacher; give them"),
        ((Opdvr(top_k=8), Opd(estimator="jsd", top_k=4)), "top_k 4 and 8; give them the same top_k"),
    ],
)
def test_terms_that_want_other_tokens_are_refused(methods, message):
    with pytest.raises(ConfigError, match=message):
        _ = plan(*methods).support


def test_union_is_a_support_of_divergences():
    assert RandomCut(support="union", top_k=8).build().divergences == (Divergence("reverse_kl", "union", 8),)
    assert Opd(estimator="jsd", support="union", top_k=8).build().divergences == (Divergence("jsd", "union", 8),)
