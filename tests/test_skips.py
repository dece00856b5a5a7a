"""Updates without a usable gradient are left out, counted, and end a run in which there are no others."""

import math

import pytest
import torch

from hybrid.errors import HybridError
from hybrid.skips import Skips
from hybrid.trainer import HybridConfig, HybridTrainer
from tests.tiny_models import coin, model, prompts, tokenizer


def test_so_many_in_a_row_stop_a_run():
    skips = Skips(3)
    for norm in (math.nan, math.inf, 1.0, math.nan, -math.inf):
        skips.judge(1, norm, skipped=False)
    assert skips.total == 4
    with pytest.raises(HybridError, match="3 updates in a row, up to step 7"):
        skips.judge(7, 1.0, skipped=True)


@pytest.fixture
def trainer(tmp_path):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    args = HybridConfig(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        bad_gradients=2,
        use_cpu=True,
        bf16=False,
    )
    yield HybridTrainer(model(0), "grpo", None, [coin], args, prompts(), processing_class=tokenizer())
    torch.set_default_dtype(before)


def spoil(trainer, steps):
    """Makes the gradient infinite in some steps; returns the weights after each update."""
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda grad: grad * math.inf if trainer.state.global_step in steps else grad)
    return weight


def test_a_bad_gradient_leaves_the_weights_alone(trainer):
    weight = spoil(trainer, {0})
    before = weight.detach().clone()
    trainer.args.max_steps = 1
    trainer.train()
    assert weight.detach().equal(before)
    assert [entry["gradient/skipped"] for entry in trainer.state.log_history if "loss" in entry] == [1]


def test_a_run_goes_on_after_a_bad_gradient_and_stops_after_two(trainer):
    weight = spoil(trainer, {0, 2, 3})
    before = weight.detach().clone()
    with pytest.raises(HybridError, match="up to step 4"):
        trainer.train()
    assert weight.isfinite().all()
    assert not weight.detach().equal(before)
