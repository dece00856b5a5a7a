"""Every method trains through the real trainer, and `hybrid explain` finds the same losses in the recorded rollouts."""

import string
from pathlib import Path

import pytest
from datasets import Dataset

from hybrid.explain import explain
from hybrid.methods import METHODS, method_of
from hybrid.records import read_records
from hybrid.rewards.config import ExactConfig
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.watching import rollout_lines
from teachers.local import LocalTeacher
from tests.tiny_models import model, tokenizer

STEPS = 20
SETTINGS = {
    "kat": {"window": 2, "patience": 1, "min_samples": 4, "warmup_steps": 2, "n_exempt": 1},
    "random_cut": {},
    "mix": {
        "parts": [
            {"method": {"name": "grpo"}},
            {"weight": {"start": 1.0, "end": 0.0, "steps": 10}, "method": {"name": "opd"}},
        ]
    },
}
VARIANTS = {
    "opd reverse KL": {"name": "opd", "estimator": "reverse_kl"},
    "opd top-k": {"name": "opd", "top_k": 4},
    "opd forward KL on the student's top-k": {"name": "opd", "estimator": "forward_kl", "top_k": 6},
    "opdvr top-k": {"name": "opdvr", "top_k": 4},
    "opdvr on the teacher's candidates": {"name": "opdvr", "top_k": 4, "support": "teacher"},
    "opdvr on the candidates of both": {"name": "opdvr", "top_k": 4, "support": "intersection"},
    "grpd on the candidates of either": {"name": "grpd", "top_k": 4, "support": "union", "candidate_weight": "none"},
    "opd on the candidates of both": {"name": "opd", "top_k": 4, "support": "intersection"},
    "opd JSD on both top-k": {"name": "opd", "estimator": "jsd", "top_k": 4, "support": "union"},
    "opd forward KL on the teacher's top-k": {
        "name": "opd",
        "estimator": "forward_kl",
        "top_k": 4,
        "support": "teacher",
    },
    "random_cut on both top-k": {"name": "random_cut", "top_k": 4, "support": "union"},
    "mix of candidates and reward": {
        "name": "mix",
        "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opdvr", "top_k": 4, "support": "teacher"}}],
    },
    "kat on the teacher's top-k": {"name": "kat", **SETTINGS["kat"], "top_k": 4, "support": "teacher"},
    "kat on both top-k": {"name": "kat", **SETTINGS["kat"], "top_k": 4, "support": "union"},
    "random_cut on the teacher's top-k": {"name": "random_cut", "top_k": 4, "support": "teacher"},
    "opd k3": {"name": "opd", "estimator": "k3"},
    "sipo_analytic reverse KL": {"name": "sipo_analytic", "alpha": 1.0, "top_k": 4},
    "opdvr without truncated": {"name": "opdvr", "truncated": "skip"},
    "dapo without truncated": {"name": "dapo", "drop_truncated": True},
    "shaping return to go": {"name": "shaping", "estimator": "return_to_go"},
}
CASES = {**{name: {"name": name, **SETTINGS.get(name, {})} for name in METHODS}, **VARIANTS}


def rows() -> Dataset:
    letters = string.ascii_lowercase
    return Dataset.from_dict(
        {
            "prompt": [f"{letter}=" for letter in letters],
            "answer": list(letters),
            "demonstration": [f"{letter}{letter}" if place % 3 else None for place, letter in enumerate(letters)],
            "teacher_accuracy": [place / 26 for place in range(26)],
            "degraded": ["=" for _ in letters],
        }
    )


@pytest.mark.parametrize("case", sorted(CASES))
def test_logged_terms_agree_with_explain(tmp_path: Path, case: str):
    method = method_of(CASES[case])
    args = HybridConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        seed=1,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    states = {}

    def remember(watch):
        states[watch.step] = dict(watch.state)
        (tmp_path / f"step{watch.step}.jsonl").write_text("\n".join(rollout_lines(watch, tokenizer())) + "\n")

    trainer = HybridTrainer(
        model(0),
        method=method,
        teacher=LocalTeacher(model(1), tokenizer()),
        reward_funcs=[ExactConfig(pattern="([a-z])").build()],
        args=args,
        train_dataset=rows(),
        processing_class=tokenizer(),
        watch=remember,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    some = 0.0
    for step, entry in enumerate(logged):
        records = read_records(tmp_path / f"step{step}.jsonl")
        explained = explain(method, records, step=step, state=states[step] or None)["loss"]
        for term in ("policy", "kl", "sft"):
            assert entry[f"loss/{term}"] == pytest.approx(explained[term], abs=1e-5, rel=1e-5), (step, term)
        assert entry["loss"] == pytest.approx(explained["total"], abs=1e-4, rel=1e-4), step
        some += abs(explained["total"])
    assert some > 0
