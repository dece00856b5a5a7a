"""Candidate sets through the real trainer, against the whole distributions of both models."""

import pytest
import torch

from hybrid.collect import Scorer
from hybrid.generation import StepWatch
from hybrid.methods.opd import Opd
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.cache import CachedTeacher
from teachers.local import LocalTeacher
from teachers.protocol import Teacher
from tests.reference.candidates import candidate_gaps
from tests.tiny_models import model, prompts, tokenizer

SUPPORTS = ["student", "teacher", "intersection", "union"]
TOP_K = 4


@pytest.fixture(autouse=True)
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def trained(folder, support: str, teacher: Teacher, steps: int) -> tuple[list[StepWatch], list[dict[str, float]]]:
    """What was assigned at each step, and what was logged."""
    watched: list[StepWatch] = []
    args = HybridConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, num_generations=2, seed=1,
        max_completion_length=6, learning_rate=1e-2, logging_steps=1, disable_tqdm=True, save_strategy="no",
        use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = HybridTrainer(
        model(0),
        Opd(top_k=TOP_K, support=support),
        {"teacher": Scorer(teacher=teacher)},
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        watch=watched.append,
    )
    trainer.train()
    return watched, [entry for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def distribution(of: torch.nn.Module, ids: list[int], place: int) -> list[float]:
    """Log-probs of every token at one place of a response, of which `ids` is what stands before."""
    return of(torch.tensor([ids[:place]])).logits[0, -1].double().log_softmax(-1).tolist()


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_run_trains_the_candidates_of_both_models(tmp_path, support):
    (watched,), _ = trained(tmp_path, support, LocalTeacher(model(1), tokenizer()), steps=1)
    ids_BTK, value_BTK = watched.batch.views["student"].top_ids_BTK, watched.assignment.terms[0].candidate_BTK
    assert ids_BTK is not None
    assert value_BTK is not None
    sizes = set()
    for row, rollout in enumerate(watched.rollouts):
        text = [*rollout.prompt_ids, *rollout.completion_ids]
        for t in range(len(rollout.completion_ids)):
            place = len(rollout.prompt_ids) + t
            student, teacher = distribution(model(0), text, place), distribution(model(1), text, place)
            want = candidate_gaps(student, teacher, support, TOP_K)
            pairs = zip(ids_BTK[row, t].tolist(), value_BTK[row, t].tolist(), strict=True)
            assert {v: x for v, x in pairs if x != 0} == pytest.approx(want, abs=1e-5)
            sizes.add(len(want))
    assert sizes == {TOP_K} if support in ("student", "teacher") else len(sizes) > 1
    if support == "intersection":
        assert 0 in sizes  # random models: at some place they have nothing in common


@pytest.mark.parametrize("support", ["student", "teacher", "intersection"])
def test_a_teacher_that_gives_lists_alone_teaches_the_same(tmp_path, support):
    """A cache asks as a server does: for log-probs of ids or for the teacher's own list, never a distribution."""
    local = LocalTeacher(model(1), tokenizer())
    _, whole = trained(tmp_path / "a", support, local, steps=4)
    _, lists = trained(tmp_path / "b", support, CachedTeacher(local, tmp_path / "scores"), steps=4)
    for one, other in zip(whole, lists, strict=True):
        assert other["loss/policy"] == pytest.approx(one["loss/policy"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert any(abs(entry["loss/policy"]) > 0 for entry in whole)
