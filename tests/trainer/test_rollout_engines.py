"""Responses that another engine generates: what TRL is told, and how that engine's drift is corrected and shown.

vLLM itself generates on GPUs alone, so a subclass stands in for it here: it samples as ever and reports log-probs that
differ from the trainer's by a known amount, as an engine of another precision or with old weights does.
"""

import math

import pytest
import torch

from hybrid.config import ExperimentConfig
from hybrid.engine import Work
from hybrid.errors import ConfigError
from hybrid.methods import method_of
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.training_args import rollout_settings, training_args
from teachers.local import LocalTeacher
from tests.tiny_models import coin, model, prompts, tokenizer

DRIFT = 0.25


class Drifting(HybridTrainer):
    """Its engine finds every sampled token less likely than the trainer does, by `DRIFT` nats."""

    drift = DRIFT

    def _generate_single_turn(self, prompt_ids, images, *others, **more):
        written = list(super()._generate_single_turn(prompt_ids, images, *others, **more))
        self.use_vllm = True  # from here on TRL treats the responses as an engine's
        written[1] = [self._own_logprobs(p, c) for p, c in zip(prompt_ids, written[0], strict=True)]
        return tuple(written)

    @torch.no_grad()
    def _own_logprobs(self, prompt, completion):
        logits = self.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        return [float(logprobs[t, token]) - self.drift for t, token in enumerate(completion)]

    def _move_model_to_vllm(self):
        raise AssertionError("no weights are moved here")


def first_step(folder, trainer_class, method, **settings):
    args = HybridConfig(
        output_dir=str(folder), max_steps=1, max_completion_length=8, logging_steps=1, seed=3, disable_tqdm=True,
        save_strategy="no", use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        max_grad_norm=1e9, **settings,
    )  # fmt: skip
    trainer = trainer_class(
        model(0), method=method_of(method), teacher=LocalTeacher(model(1), tokenizer()), reward_funcs=[coin], args=args,
        train_dataset=prompts(), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "grad_norm" in entry)


@pytest.mark.parametrize(
    ("method", "factor"),
    [
        ({"name": "grpo"}, math.exp(DRIFT)),
        ({"name": "opdvr"}, math.exp(DRIFT)),
        ({"name": "opd", "estimator": "k2"}, math.exp(DRIFT)),
        ({"name": "grpo_opd", "combine": "losses"}, math.exp(DRIFT)),
        ({"name": "opd", "estimator": "reverse_kl"}, 1.0),
    ],
)
def test_sampled_terms_are_weighed_by_the_engines_drift_and_full_divergences_are_not(tmp_path, method, factor):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    plain = first_step(tmp_path / "plain", HybridTrainer, method)
    drifting = first_step(tmp_path / "drift", Drifting, method, **settings)
    assert plain["grad_norm"] > 0
    assert drifting["grad_norm"] == pytest.approx(factor * plain["grad_norm"], rel=1e-4)


def test_the_weights_are_truncated(tmp_path):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1}
    method = {"name": "opd", "estimator": "k2"}
    plain = first_step(tmp_path / "plain", HybridTrainer, method)
    drifting = first_step(tmp_path / "drift", Drifting, method, **settings)
    assert drifting["grad_norm"] == pytest.approx(1.1 * plain["grad_norm"], rel=1e-4)


def test_the_largest_gap_between_engine_and_trainer_is_told(tmp_path):
    assert first_step(tmp_path / "a", Drifting, {"name": "opd"})["sync/max_abs_gap"] == pytest.approx(DRIFT, abs=1e-5)
    assert "sync/max_abs_gap" not in first_step(tmp_path / "b", HybridTrainer, {"name": "opd"})


def experiment(**rollouts):
    return ExperimentConfig.model_validate(
        {
            "name": "t",
            "student": {"model": "m"},
            "method": {"name": "grpo"},
            "data": {"source": "x.jsonl"},
            "train": {"max_prompt_length": 100, "max_completion_length": 28},
            "engine": {"rollouts": rollouts},
        }
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package of vLLM's name, for nothing but its name is looked at before TRL starts it."""
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def test_colocated_vllm_reaches_trl(installed, tmp_path):
    rollouts = {"engine": "vllm_colocate", "gpu_memory": 0.4, "tensor_parallel": 2, "correction_max": 3.0}
    config = experiment(**rollouts)
    args = training_args(config, config.methods["grpo"], tmp_path, reward_weights=[1.0])
    assert args.use_vllm
    assert args.vllm_mode == "colocate"
    assert args.vllm_gpu_memory_utilization == 0.4
    assert args.vllm_tensor_parallel_size == 2
    assert args.vllm_max_model_length == 128
    assert args.vllm_importance_sampling_correction
    assert args.vllm_importance_sampling_mode == "token_truncate"
    assert args.vllm_importance_sampling_clip_max == 3.0
    assert Work.of(config, 1).responses == args.generation_batch_size


def test_a_vllm_server_reaches_trl(installed):
    settings = rollout_settings(experiment(engine="vllm_server", url="http://node2:8000", correction="none"))
    assert settings == {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_clip_max": 2.0,
        "vllm_server_base_url": "http://node2:8000",
    }


def test_the_trainers_own_generation_asks_for_nothing():
    assert rollout_settings(experiment()) == {}


@pytest.mark.parametrize("rollouts", [{"engine": "vllm_colocate"}, {"engine": "vllm_server", "url": "http://n:1"}])
def test_vllm_must_be_installed_for_it(rollouts):
    with pytest.raises(ConfigError, match=r"pip install 'hybrid-rl\[vllm\]'"):
        rollout_settings(experiment(**rollouts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM generates for a trainer on a GPU alone")
def test_colocated_vllm_generates_with_the_trainers_weights(tmp_path):
    entry = first_step(tmp_path, HybridTrainer, {"name": "opd"}, use_vllm=True, vllm_mode="colocate")
    assert entry["sync/max_abs_gap"] < 0.1
