"""The seams of TRL that HybridTrainer relies on, and that a GRPO objective is stock GRPO to the last printed digit."""

import inspect

import pytest
import torch
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from hybrid.methods.grpo import Grpo
from hybrid.trainer import HybridConfig, HybridTrainer
from tests.tiny_models import coin, model, prompts, tokenizer

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo", "cispo"]


def losses(trainer_class, config_class, tmp_path, method=None, **settings):
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "epsilon": 0.2, **settings}
    extra = {} if method is None else {"method": method}
    args = config_class(
        output_dir=str(tmp_path),
        max_steps=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        seed=3,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = trainer_class(
        model(0), reward_funcs=[coin], args=args, train_dataset=prompts(), processing_class=tokenizer(), **extra
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"], entry.get("reward")) for entry in history]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("accumulation", "reuse"), [(1, 1), (2, 1), (2, 2)])
def test_a_grpo_objective_equals_stock_grpo(tmp_path, loss_type, accumulation, reuse):
    settings = {
        "loss_type": loss_type,
        "gradient_accumulation_steps": accumulation,
        "num_iterations": reuse,
        "per_device_train_batch_size": 8 // accumulation,
        "epsilon_high": 5.0 if loss_type == "cispo" else None,
    }
    stock = losses(GRPOTrainer, GRPOConfig, tmp_path / "stock", **settings)
    ours = losses(HybridTrainer, HybridConfig, tmp_path / "ours", method=Grpo(), **settings)
    assert any(loss != 0 or norm > 0 for loss, norm, _ in stock), "a run without any signal would prove nothing"
    for want, got in zip(stock, ours, strict=True):
        assert got[:2] == pytest.approx(want[:2], rel=1e-5, abs=1e-7)
        assert got[2] == want[2]


def test_signatures_of_the_seams():
    parameters = {
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_generate_single_turn": [
            "self",
            "prompt_ids",
            "images",
            "multimodal_fields",
            "num_generations",
            "has_tool_images",
        ],
        "_compute_loss": ["self", "model", "inputs"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    }
    for name, want in parameters.items():
        assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == want, name
    logps = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert logps[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]


def test_what_survives_the_shuffle_and_the_split():
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    batch = {"completion_ids": torch.arange(8).view(4, 2), "hybrid_row": torch.arange(4), "num": torch.tensor(3)}
    parts = split_tensor_dict(shuffle_sequence_dict(batch), 2)
    rows = torch.cat([part["hybrid_row"] for part in parts])
    assert sorted(rows.tolist()) == [0, 1, 2, 3]
    assert torch.equal(torch.cat([part["completion_ids"] for part in parts])[:, 0], 2 * rows)


def test_cispo_with_a_clip_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="epsilon_high"):
        HybridConfig(str(tmp_path), loss_type="cispo", use_cpu=True, bf16=False)


def test_one_generation_is_allowed_where_the_method_allows_it(tmp_path):
    args = HybridConfig(str(tmp_path), num_generations=1, per_device_train_batch_size=8, use_cpu=True, bf16=False)
    assert args.num_generations == 1
    with pytest.raises(ValueError, match="at least 2 responses"):
        HybridTrainer(model(0), "grpo", None, [coin], args, prompts(), processing_class=tokenizer())
