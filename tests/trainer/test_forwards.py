"""How often a step runs the student: once for the loss, and again only where credit cannot be read off that forward."""

import pytest
import torch

from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.local import LocalTeacher
from tests.integration.engine_worker import recorded
from tests.tiny_models import coin, model, prompts, tokenizer

REVERSE_KL = {"name": "opd", "estimator": "reverse_kl"}
CASES = {
    # one forward with gradients; OPDVR's credit is read off it before the loss is
    "grpo": ("grpo", {}, (1, 0)),
    "opdvr": ("opdvr", {}, (1, 0)),
    "reverse KL": (REVERSE_KL, {}, (1, 0)),
    # two micro-batches of a generation: the credit of both comes before the loss of either
    "opdvr accumulated": ("opdvr", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}, (2, 2)),
    # TRL measures the log-probs of responses that are used again, and they are credit's too
    "opdvr reused": ("opdvr", {"num_iterations": 2}, (1, 1)),
    # KAT picks the student's candidates before the teacher scores them
    "kat": ({"name": "kat"}, {}, (1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_student_runs_no_oftener_than_it_must(tmp_path, monkeypatch, case):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # responses that are given, not generated
    method, settings, want = CASES[case]
    student, ran = model(0), []
    student.model.register_forward_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    args = HybridConfig(
        output_dir=str(tmp_path), max_steps=1, num_generations=2, max_completion_length=8, disable_tqdm=True, seed=1,
        save_strategy="no", use_cpu=True, bf16=False, **({"per_device_train_batch_size": 6} | settings),
    )  # fmt: skip
    trainer = HybridTrainer(
        student, method, LocalTeacher(model(1), tokenizer()), [coin], args, prompts(), processing_class=tokenizer(),
        rollout_func=recorded,
    )  # fmt: skip
    trainer.train()
    assert (sum(ran), len(ran) - sum(ran)) == want
