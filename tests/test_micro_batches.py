"""Rows are cut by a budget of padded tokens; what is trained and logged stays that of the whole batch."""

import logging
import re
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.cutting import MOST_PADDING, cut_rows, lengths_of, padded_tokens, padding_share
from hybrid.errors import ConfigError
from hybrid.micro_batches import check_settings, refuse_tiles
from hybrid.plan import plan_lines
from hybrid.read_config import read_experiment
from hybrid.teacher_config import LocalTeacherConfig
from hybrid.teaching import Making, local
from hybrid.tiny_vision import vision_processor
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.training_args import training_args
from teachers.local import LocalTeacher
from tests.experiments import QUICKSTART
from tests.tiny_models import coin, model, prompts, tokenizer
from tests.tiny_vision_models import pictured_prompts, vision_model
from tests.trainer.test_rollout_engines import Drifting, first_step

TOLERANCE = 1e-6
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo", "cispo"]
HOW_CUT = ("micro_batches/number", "micro_batches/padding")


# --- how rows are cut -------------------------------------------------------------------------------------------------


def long_tailed(num=256, seed=0):
    """Prompts of 20 to 120 tokens, and responses of which a few are twenty times as long as most."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(20, 120, num), np.minimum(rng.lognormal(5.5, 1.0, num), 8192).astype(int) + 1], 1)


@pytest.mark.parametrize("seed", range(5))
def test_padding_of_a_long_tail_stays_under_the_limit(seed):
    lengths, budget = long_tailed(seed=seed), 16_384
    cuts = cut_rows(lengths, budget)
    assert padding_share(lengths, cuts) <= 0.15 < 0.7 < padding_share(lengths, [list(range(256))])
    assert max(padded_tokens(lengths[rows]) for rows in cuts) <= budget
    # not bought with tiny micro-batches: thousands of tokens each, on average
    assert lengths.sum() / len(cuts) >= 4000


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 300),
    st.integers(1, 14),
)
def test_every_row_goes_once_and_within_the_budget(rows, budget, count):
    lengths = np.array(rows)
    cuts = cut_rows(lengths, budget, count)
    assert sorted(row for piece in cuts for row in piece) == list(range(len(rows)))
    for piece in cuts:
        assert len(piece) == 1 or padded_tokens(lengths[piece]) <= budget
    assert len(cuts) >= min(count, len(rows))
    if len(cut_rows(lengths, budget)) > 1:
        assert padding_share(lengths, cuts) <= MOST_PADDING
    elif count == 1:
        assert cuts == [sorted(range(len(rows)), key=lambda row: (-lengths[row].sum(), row))]


def test_a_batch_that_fits_is_left_whole_and_the_best_cut_comes_first():
    lengths = np.array([[1, 1], [1, 9], [1, 9], [1, 1]])
    assert cut_rows(lengths, 40) == [[1, 2, 0, 3]]
    # 4 rows of 10 positions are too many; three of 10 and one of 2 hold 8 of padding, two and two hold none
    assert cut_rows(lengths, 39) == [[1, 2], [0, 3]]
    assert cut_rows(lengths, 40, count=2) == [[1, 2], [0, 3]]


def test_lengths_are_those_of_the_masks_and_never_zero():
    prompt, completion = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]])
    assert lengths_of(prompt, completion).tolist() == [[2, 1], [3, 1]]
    assert lengths_of(prompt, completion, multiple=4).tolist() == [[4, 4], [4, 4]]


# --- the same training ------------------------------------------------------------------------------------------------


def train(folder, method="opd", *, budget=None, student=None, data=None, processor=None, steps=1, **settings):
    chosen = {"per_device_train_batch_size": 8, "num_generations": 4, "epsilon": 0.2, "learning_rate": 1e-2, **settings}
    args = HybridConfig(
        output_dir=str(folder),
        max_steps=steps,
        max_completion_length=12,
        logging_steps=1,
        seed=3,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        max_tokens_per_micro_batch=budget,
        **chosen,
    )
    teacher = LocalTeacher(model(1), tokenizer())
    if processor is not None:
        teacher = LocalTeacher(vision_model("qwen3_vl", 1), processor.tokenizer, processor=processor)
    trainer = HybridTrainer(
        student or model(0),
        method=method,
        teacher=teacher,
        reward_funcs=[coin],
        args=args,
        train_dataset=data or prompts(),
        processing_class=processor or tokenizer(),
    )
    trainer.train()
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(whole, cut, tolerance=TOLERANCE):
    """Every logged number of the first update, but for times and for how the work was cut."""
    want, got = (next(entry for entry in t.state.log_history if "loss" in entry) for t in (whole, cut))
    names = {name for name in want.keys() | got.keys() if not name.startswith("time/")}
    for name in names - {"step_time", "teacher/batches", "teacher/positions", *HOW_CUT}:
        assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), name
    assert got["micro_batches/number"] > 1
    assert want["grad_norm"] > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_of_trl_adds_up(tmp_path, loss_type):
    settings = {"loss_type": loss_type, "epsilon_high": 5.0 if loss_type == "cispo" else None}
    if loss_type == "luspo":
        settings["importance_sampling_level"] = "sequence"
    whole, cut = (train(tmp_path / str(n), "grpo", budget=n, **settings) for n in (None, 48))
    assert_same(whole, cut)


def test_reused_and_clipped_rollouts_add_up(tmp_path):
    """The second use of a batch has ratios other than 1, so that clips, their extremes and old log-probs count."""
    settings = {"num_iterations": 2, "learning_rate": 0.1, "steps": 2}
    whole, cut = (train(tmp_path / str(n), "grpo", budget=n, **settings) for n in (None, 48))
    assert max(logged(whole, "clip_ratio/high_max")) > 0
    for name in ("loss", "clip_ratio/low_min", "clip_ratio/high_max", "clip_ratio/region_mean", "entropy"):
        assert logged(cut, name) == pytest.approx(logged(whole, name), abs=1e-4), name


def test_a_reference_model_and_an_evaluation_are_cut_too(tmp_path):
    model(0).save_pretrained(tmp_path / "student")
    settings = {"beta": 0.1, "num_iterations": 2, "per_device_eval_batch_size": 8}
    whole, cut = (
        train(tmp_path / str(n), "grpo", budget=n, student=str(tmp_path / "student"), **settings) for n in (None, 48)
    )
    assert_same(whole, cut)
    trainers = [train(tmp_path / f"eval{n}", budget=n, steps=1) for n in (None, 48)]
    for trainer in trainers:
        trainer.eval_dataset = prompts(8)
        torch.manual_seed(0)
        trainer.evaluate()
    first, second = (trainer.state.log_history[-1] for trainer in trainers)
    assert second["eval_micro_batches/number"] > 1
    for name in ("eval_loss", "eval_entropy", "eval_loss/policy", "eval_gap/mean"):
        assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("method", ["va_opd", "sft", "grpo"])
def test_pictures_go_with_their_rows(tmp_path, method):
    """Rows with no, one and two pictures; in some micro-batches nobody has one."""
    processor = vision_processor()
    whole, cut = (
        train(
            tmp_path / str(n),
            method,
            budget=n,
            student=vision_model("qwen3_vl", 0),
            data=pictured_prompts(),
            processor=processor,
            shuffle_dataset=False,
            per_device_train_batch_size=16,
        )
        for n in (None, 60)
    )
    assert_same(whole, cut, tolerance=1e-5)
    assert logged(cut, "micro_batches/number")[0] > 4


def test_one_row_that_is_longer_goes_alone_and_is_told_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hybrid.micro_batches"):
        trainer = train(tmp_path, budget=2, steps=2)
    told = [record.getMessage() for record in caplog.records if record.name == "hybrid.micro_batches"]
    assert len(told) == 1
    assert "more than max_tokens_per_micro_batch = 2" in told[0]
    assert logged(trainer, "micro_batches/number") == [8, 8]
    assert logged(trainer, "micro_batches/padding") == pytest.approx([0, 0], abs=1e-9)


@pytest.mark.parametrize(
    "setting", [{"entropy_coef": 0.1}, {"use_adaptive_entropy": True}, {"top_entropy_quantile": 0.5}]
)
def test_what_does_not_add_up_is_refused(tmp_path, setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is taken over the rows of one forward"):
        train(tmp_path, "grpo", budget=100, **setting)


def test_pictures_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match="cannot cut pictures that are stored with num_tiles"):
        refuse_tiles({"num_tiles": [1, 2], "pixel_values": torch.zeros(3, 1)})
    args = HybridConfig("out", max_tokens_per_micro_batch=9, use_cpu=True, bf16=False)
    spread = SimpleNamespace(
        args=args,
        aux_loss_enabled=False,
        is_deepspeed_enabled=True,
        is_fsdp_enabled=False,
        accelerator=SimpleNamespace(num_processes=2),
        processing_class=vision_processor(),
    )
    with pytest.raises(ConfigError, match="for a student that reads pictures leave it out, or use DDP"):
        check_settings(spread)
    spread.accelerator.num_processes = 1
    check_settings(spread)


def test_an_experiment_is_cut_as_its_plan_says(tmp_path, tiny_cache):
    """What the plan prints, what TRL is told, and what a local teacher is told are one number."""
    wanted = ["train.generations=4", "train.prompts_per_step=8", "train.max_completion_length=64"]
    whole, cut = (
        read_experiment(QUICKSTART, [*wanted, f"engine.max_tokens_per_micro_batch={n}"]) for n in ("null", 600)
    )
    lines, plain = plan_lines(cut), plan_lines(whole)
    assert "1 micro-batches x 32 responses, sorted by length and cut at 600 padded tokens" in lines[1]
    assert "cut" not in plain[1]
    activations = [float(re.findall(r"activations ([0-9.e-]+)", line[2])[0]) for line in (plain, lines)]
    assert activations[1] == pytest.approx(activations[0] * 600 / (32 * 64), rel=0.05)
    assert isinstance(cut.teacher, LocalTeacherConfig)
    args = training_args(cut, cut.method, tmp_path, reward_weights=())
    assert args.max_tokens_per_micro_batch == 600
    with ExitStack() as stack:
        making = Making.of(cut, stack, folder=tmp_path, student=str(tmp_path))
        own = cut.teacher.model_copy(update={"token_budget": 50})
        for config, budget in ((cut.teacher, 600), (own, 50)):
            teacher = local(config, "teacher", making)
            assert isinstance(teacher, LocalTeacher)
            assert teacher.settings.token_budget == budget


def test_the_drift_of_another_engine_is_cut_with_its_rows(tmp_path):
    method = {"name": "mix", "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opd"}}]}
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 10.0}
    whole, cut = (
        first_step(tmp_path / str(n), Drifting, method, max_tokens_per_micro_batch=n, **settings) for n in (None, 40)
    )
    assert cut["micro_batches/number"] > 1
    for name in ("loss", "grad_norm", "loss/policy", "sampling/importance_sampling_ratio/mean", "entropy"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name


def test_a_budget_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be at least 1; got 0"):
        train(tmp_path, "grpo", budget=0)
