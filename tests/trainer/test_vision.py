"""Students and teachers that read pictures, through the real trainer: what is measured is what the models say."""

import pytest
import torch
from torch.testing import assert_close

from hybrid.explain import explain
from hybrid.generation import StepWatch
from hybrid.methods import method_of
from hybrid.records import read_records
from hybrid.rewards.config import ExactConfig
from hybrid.tiny_vision import vision_processor
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.watching import rollout_lines
from teachers.contexts import degraded_image
from teachers.local import LocalTeacher
from tests.tiny_models import coin
from tests.tiny_vision_models import FAMILIES, pictured_prompts, vision_model

SETTINGS = {"kat": {"window": 2, "patience": 1, "min_samples": 4, "warmup_steps": 1, "n_exempt": 1}}


def train(tmp_path, method, *, family="qwen3_vl", steps=1, watch=None, rewards=(coin,), teacher=None, **settings):
    settings = {"per_device_train_batch_size": 16, "num_generations": 4, "shuffle_dataset": False, **settings}
    args = HybridConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=steps,
        max_completion_length=6,
        learning_rate=1e-2,
        logging_steps=1,
        seed=1,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    processor = vision_processor()
    trainer = HybridTrainer(
        vision_model(family, 0),
        method=method_of(method),
        teacher=teacher or LocalTeacher(vision_model(family, 1), processor.tokenizer, processor=processor),
        reward_funcs=list(rewards) or None,
        args=args,
        train_dataset=pictured_prompts(),
        processing_class=processor,
        watch=watch,
    )
    trainer.train()
    return trainer


def logged(trainer, *names):
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


def own_logprobs(model, rollout, images):
    """Log-probs of one response by the model itself: a single row, nothing padded."""
    processor = vision_processor()
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        inputs |= dict(processor.image_processor(images=list(images), return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == processor.image_token_id).int()
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[0]
    start = len(rollout.prompt_ids) - 1
    logprobs = torch.log_softmax(logits[start:-1], -1)
    return logprobs.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_the_models_say_row_by_row(tmp_path, family):
    seen: list[StepWatch] = []
    train(tmp_path, "va_opd", family=family, watch=seen.append)
    batch, rollouts = seen[0].batch, seen[0].rollouts
    assert batch.student_logprob_BT is not None
    assert {len(rollout.images) for rollout in rollouts} == {0, 1, 2}
    student, teacher = vision_model(family, 0), vision_model(family, 1)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        blurred = [degraded_image(image, ratio=0.1) for image in rollout.images]
        own = own_logprobs(student, rollout, rollout.images)
        full, degraded = (own_logprobs(teacher, rollout, images) for images in (rollout.images, blurred))
        assert_close(batch.student_logprob_BT[row, :length], own, rtol=0, atol=1e-4)
        assert_close(batch.views["teacher"].logprob_BT[row, :length], full, rtol=0, atol=1e-4)
        assert_close(batch.views["degraded"].logprob_BT[row, :length], degraded, rtol=0, atol=1e-4)
        gap = (full - degraded).abs().max()
        assert gap > 0.01 if rollout.images else gap == 0


def test_a_response_may_be_scored_in_any_micro_batch(tmp_path):
    """Rows with one, two and no pictures are cut out of the batch's patches by their own numbers."""
    from_siblings = {"name": "sipo", "contrast_context": "trajectory"}
    for method in ("va_opd", {"name": "opd", "estimator": "reverse_kl"}, "sft", from_siblings):
        whole = logged(train(tmp_path / "whole", method), "loss", "grad_norm")
        split = logged(
            train(tmp_path / "split", method, per_device_train_batch_size=4, gradient_accumulation_steps=4),
            "loss",
            "grad_norm",
        )
        assert split[0] == pytest.approx(whole[0], rel=1e-3), method
        assert whole[0][1] > 0


@pytest.mark.parametrize("method", ["va_opd", "grpo", "sipo", "rstg", "kat"])
def test_logged_terms_agree_with_explain(tmp_path, method):
    chosen = method_of({"name": method, **SETTINGS.get(method, {})})
    states, steps = {}, 3

    def remember(watch):
        states[watch.step] = dict(watch.state)
        lines = rollout_lines(watch, vision_processor())
        (tmp_path / f"step{watch.step}.jsonl").write_text("\n".join(lines) + "\n")

    trainer = train(
        tmp_path,
        chosen,
        steps=steps,
        watch=remember,
        rewards=(ExactConfig(pattern="(.*)").build(),),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
    )
    for step, (loss, policy, kl, sft) in enumerate(logged(trainer, "loss", "loss/policy", "loss/kl", "loss/sft")):
        records = read_records(tmp_path / f"step{step}.jsonl")
        explained = explain(chosen, records, step=step, state=states[step] or None)["loss"]
        for term, value in (("policy", policy), ("kl", kl), ("sft", sft)):
            assert value == pytest.approx(explained[term], abs=1e-5, rel=1e-5), (step, term)
        assert loss == pytest.approx(explained["total"], abs=1e-4, rel=1e-4)
