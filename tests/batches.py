"""Rollout batches for tests of the mathematics: everything measured, nasty rows included, float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid.objective.losses import StudentPass
from hybrid.objective.objective import Assignment, Loss, Objective
from hybrid.types import Demonstration, RolloutBatch, State, View, take_rows

F64 = torch.float64
NAN = float("nan")


def numbers(rows: Sequence[Sequence[float]] | Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def view(rows: Sequence[Sequence[float]], valid: Sequence[Sequence[bool]] | None = None) -> View:
    logprob_BT = numbers(rows)
    valid_BT = torch.ones_like(logprob_BT, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return View(logprob_BT=logprob_BT, valid_BT=valid_BT)


def plain_batch(num_tokens: Sequence[int], group: Sequence[int] | None = None, **fields) -> RolloutBatch:
    """Responses of the given lengths, one prompt unless told otherwise; measurements by name."""
    length_B1 = torch.tensor(num_tokens)[:, None]
    width = max([len(row) for row in fields.get("student_logprob_BT", [])] + list(num_tokens))
    return RolloutBatch(
        group_B=torch.tensor([0] * len(num_tokens) if group is None else group),
        mask_BT=torch.arange(width)[None] < length_B1,
        dtype=F64,
        **fields,
    )


def logprobs(generator: torch.Generator, *shape: int) -> Tensor:
    return -3 * torch.rand(*shape, generator=generator, dtype=F64)


def support(generator: torch.Generator, valid_BT: Tensor, num_top: int, ids_BTK: Tensor | None = None) -> View:
    num_rows, width = valid_BT.shape
    weight_BTK = torch.rand(num_rows, width, num_top + 1, generator=generator, dtype=F64) + 0.05
    top_BTK = (weight_BTK / weight_BTK.sum(-1, keepdim=True)).log()[..., :num_top]
    ids_BTK = torch.arange(num_top).expand_as(top_BTK) if ids_BTK is None else ids_BTK
    return View(
        logprob_BT=logprobs(generator, num_rows, width),
        valid_BT=valid_BT,
        top_ids_BTK=ids_BTK,
        top_logprob_BTK=top_BTK,
    )


def make_batch(seed: int = 0, *, groups: int = 3, size: int = 3, width: int = 7, clean: bool = False) -> RolloutBatch:
    """`groups` prompts of `size` responses; group 0 is all wrong, group 1 mixed, the rest random.

    Unless `clean`, there are an empty response, an unscored one, one whose teacher failed, one whose contexts failed,
    and prompts without a demonstration.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = groups * size
    length_B = torch.randint(1, width + 1, (num_rows,), generator=generator)
    reward_B = torch.randint(0, 2, (num_rows,), generator=generator).to(F64)
    reward_B[:size] = 0
    if groups > 1:
        reward_B[size : size + 2] = numbers([1.0, 0.0])[:size]
    lost_B = torch.zeros(num_rows, dtype=torch.bool)
    unpaired_B = lost_B.clone()
    owns_B = torch.ones(groups, dtype=torch.bool)
    if not clean:
        length_B[num_rows - 1] = 0
        reward_B[num_rows - 2] = NAN
        lost_B[torch.randint(0, num_rows, (1,), generator=generator)] = True
        unpaired_B[torch.randint(0, num_rows, (2,), generator=generator)] = True
        owns_B = torch.rand(groups, generator=generator) > 0.4
    mask_BT = torch.arange(width)[None] < length_B[:, None]
    if not clean and width > 2:
        mask_BT[1, 1] = False  # a token that a tool wrote
    teacher_BT = mask_BT & ~lost_B[:, None]
    paired_BT = teacher_BT & ~unpaired_B[:, None]
    group_B = torch.arange(groups).repeat_interleave(size)
    text_B = torch.randint(1, 4, (groups,), generator=generator) * owns_B
    return RolloutBatch(
        group_B=group_B,
        mask_BT=mask_BT,
        reward_B=reward_B,
        truncated_B=torch.rand(num_rows, generator=generator) < 0.3,
        student_logprob_BT=logprobs(generator, num_rows, width),
        entropy_BT=2 * torch.rand(num_rows, width, generator=generator, dtype=F64),
        reverse_kl_BT=torch.rand(num_rows, width, generator=generator, dtype=F64),
        teacher_accuracy_B=torch.rand(groups, generator=generator, dtype=F64)[group_B],
        views={
            "teacher": support(generator, teacher_BT, 3),
            "right": support(generator, paired_BT, 3),
            "wrong": support(generator, mask_BT, 3),
            "degraded": support(generator, mask_BT, 3),
            "reference": support(generator, mask_BT, 3),
            "student": support(generator, mask_BT, 3),
        },
        demonstration=Demonstration(
            ids_BU=torch.zeros(num_rows, 3, dtype=torch.long),
            mask_BU=torch.arange(3)[None] < text_B[group_B][:, None],
        ),
        max_length=width,
        step=60,
        dtype=F64,
    )


@dataclass(frozen=True)
class Toy:
    """A student with one parameter per token, so that a gradient says which tokens train."""

    theta_BT: Tensor
    phi_BU: Tensor

    @staticmethod
    def near(batch: RolloutBatch, seed: int = 7) -> "Toy":
        generator = torch.Generator().manual_seed(seed)
        width = 0 if batch.demonstration is None else batch.demonstration.ids_BU.shape[1]
        theta_BT = 0.05 * torch.randn(batch.mask_BT.shape, generator=generator, dtype=F64)
        phi_BU = -torch.rand(len(batch.group_B), width, generator=generator, dtype=F64)
        return Toy(theta_BT.requires_grad_(), phi_BU.requires_grad_())

    @staticmethod
    def same(batch: RolloutBatch) -> "Toy":
        toy = Toy.near(batch)
        return Toy(torch.zeros_like(toy.theta_BT).requires_grad_(), toy.phi_BU)

    def rows(self, index: slice | Tensor) -> "Toy":
        return Toy(self.theta_BT[index], self.phi_BU[index])

    def answers(self, batch: RolloutBatch, objective: Objective) -> StudentPass:
        old_BT = batch.student_logprob_BT
        assert old_BT is not None
        top = batch.views["student"].top_logprob_BTK if "student" in batch.views else None
        kl_BT = batch.reverse_kl_BT if batch.reverse_kl_BT is not None else torch.ones_like(old_BT)
        own_kl_BT = kl_BT.masked_fill(~batch.mask_BT, 0) * self.theta_BT.exp()
        return StudentPass(
            logprob_BT=old_BT + self.theta_BT,
            candidate_logprob_BTK=None if top is None else top + self.theta_BT[..., None],
            divergence_BT={loss: torch.where(batch.mask_BT, own_kl_BT, kl_BT) for loss in objective.divergences},
            demonstration_logprob_BU=self.phi_BU,
        )


def run(objective: Objective, batch: RolloutBatch, toy: Toy, state: State | None = None) -> Loss:
    """The loss of the whole batch."""
    assignment, _ = objective.assign(batch, objective.init() if state is None else state)
    return objective.loss(assignment, batch, toy.answers(batch, objective))


def assignment_rows(assignment: Assignment, index: slice | Tensor) -> Assignment:
    return replace(assignment, terms=tuple(take_rows(term, index) for term in assignment.terms))


def advantages(objective: Objective, batch: RolloutBatch, state: State | None = None) -> Tensor:
    """scale * A summed over the policy terms."""
    return summed(objective, batch, "policy", state)


def kl_weights(objective: Objective, batch: RolloutBatch, state: State | None = None) -> Tensor:
    """scale * c summed over the divergence terms."""
    return summed(objective, batch, "kl", state)


def summed(objective: Objective, batch: RolloutBatch, kind: str, state: State | None) -> Tensor:
    assignment, _ = objective.assign(batch, objective.init() if state is None else state)
    total_BT = torch.zeros(batch.mask_BT.shape, dtype=F64)
    for term, credit in zip(objective.terms, assignment.terms, strict=True):
        if term.kind == kind:
            total_BT = total_BT + credit.scale * credit.value_BT
    return total_BT
