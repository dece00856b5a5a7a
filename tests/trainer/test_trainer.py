"""The real trainer on tiny random models: what it trains equals what the objective says, and its promises hold."""

import pytest
import torch
from peft import LoraConfig

from hybrid.errors import ConfigError, MissingMeasurement
from hybrid.generation import StepWatch, refuse_idle
from hybrid.methods import method_of
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.findings import PreflightFailed
from teachers.local import LocalTeacher
from teachers.protocol import SAMPLED
from tests.test_docs import examples
from tests.tiny_models import coin, model, prompts, tokenizer


def train(
    tmp_path, method, *, teacher=True, rewards=(coin,), steps=3, seed=3, student=0, watch=None, peft=None, **settings
):
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-2, **settings}
    args = HybridConfig(
        output_dir=str(tmp_path),
        max_steps=steps,
        max_completion_length=8,
        logging_steps=1,
        seed=seed,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = HybridTrainer(
        model(student),
        method=method,
        teacher=LocalTeacher(model(1), tokenizer()) if teacher is True else teacher,
        reward_funcs=list(rewards) or None,
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        watch=watch,
        peft_config=peft,
    )
    trainer.train()
    return trainer


def history(trainer, *names):
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


def test_two_runs_of_one_seed_are_identical(tmp_path):
    first = history(train(tmp_path / "a", "opdvr"), "loss", "grad_norm", "gap/mean")
    second = history(train(tmp_path / "b", "opdvr"), "loss", "grad_norm", "gap/mean")
    assert first == second


def test_the_logged_loss_is_the_sum_of_the_logged_terms(tmp_path):
    method = {
        "name": "mix",
        "parts": [{"method": {"name": "grpo"}}, {"weight": 0.5, "method": {"name": "opd", "estimator": "reverse_kl"}}],
    }
    for loss, policy, kl, sft in history(
        train(tmp_path, method_of(method)), "loss", "loss/policy", "loss/kl", "loss/sft"
    ):
        assert loss == pytest.approx(policy + kl + sft, rel=1e-4, abs=1e-6)
        assert kl > 0


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing(tmp_path, accumulation):
    """Credit and denominators belong to the generation batch, so splitting it leaves loss and gradient alone."""
    for method in ("opdvr", "opd", {"name": "opd", "estimator": "reverse_kl", "reduction": "response_mean"}):
        whole = history(train(tmp_path / "whole", method_of(method), steps=1), "loss", "grad_norm")
        split = history(
            train(
                tmp_path / "split",
                method_of(method),
                steps=1,
                per_device_train_batch_size=8 // accumulation,
                gradient_accumulation_steps=accumulation,
            ),
            "loss",
            "grad_norm",
        )
        assert split[0] == pytest.approx(whole[0], rel=2e-4)


def test_teacher_equal_to_student_gives_no_distillation(tmp_path):
    teacher = LocalTeacher(model(0), tokenizer())
    for loss, gap in history(train(tmp_path, "opd", teacher=teacher, steps=1), "loss", "gap/mean"):
        assert loss == pytest.approx(0, abs=1e-6)
        assert gap == pytest.approx(0, abs=1e-6)


def test_one_generation_per_prompt(tmp_path):
    trainer = train(tmp_path, "opdvr", num_generations=1)
    assert all(entry["kept/outcome_agrees"] > 0 for entry in trainer.state.log_history if "loss" in entry)


def test_lora_trains_adapters_alone(tmp_path):
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = train(tmp_path, "opd", peft=peft, steps=2)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    base = model(0).state_dict()["model.embed_tokens.weight"]
    assert torch.equal(trainer.model.get_base_model().model.embed_tokens.weight, base)


def test_reuse_of_rollouts_clips_ratios(tmp_path):
    trainer = train(tmp_path, "opdvr", steps=4, num_iterations=2, learning_rate=0.05)
    losses = history(trainer, "loss")
    assert len(losses) == 4


def test_an_unscored_response_keeps_its_distillation_term(tmp_path):
    seen: list[StepWatch] = []

    def half(completions, completion_ids, **columns):
        return [None if row % 4 == 0 else float(row % 2) for row in range(len(completions))]

    method = method_of({"name": "mix", "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opd"}}]})
    train(tmp_path, method, rewards=(half,), steps=1, watch=seen.append)
    grpo, opd = seen[0].assignment.terms
    assert seen[0].batch.reward_B.isnan().tolist() == [True, False, False, False] * 2
    assert (grpo.value_BT[0] == 0).all()
    assert (opd.value_BT[0] != 0).any()


def test_a_failed_teacher_row_keeps_its_reward_term_and_leaves_the_denominator(tmp_path):
    class Forgetful(LocalTeacher):
        """Cannot score the first row: a fault that a local model never shows by itself."""

        def score(self, rows, want=SAMPLED):
            from dataclasses import replace

            scores = super().score(rows, want)
            valid = scores.valid_BT.clone()
            valid[0] = False
            return replace(scores, valid_BT=valid, failures={0: "server said no"})

    seen: list[StepWatch] = []
    method = method_of({"name": "mix", "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opd"}}]})
    trainer = train(tmp_path, method, teacher=Forgetful(model(1), tokenizer()), steps=1, watch=seen.append)
    grpo, opd = seen[0].assignment.terms
    mask = seen[0].batch.mask_BT
    assert (opd.value_BT[0] == 0).all()
    assert opd.share_BT[1:].sum() == pytest.approx(1.0)
    assert (grpo.share_BT[0] > 0).sum() == mask[0].sum()
    assert history(trainer, "teacher/failed_rows") == [(1.0,)]


def test_what_a_run_cannot_measure_is_refused_before_it_starts(tmp_path):
    with pytest.raises(MissingMeasurement, match=r"needs scores\.teacher"):
        train(tmp_path, "opd", teacher=None)
    with pytest.raises(MissingMeasurement, match="needs reward"):
        train(tmp_path, "opdvr", rewards=())
    with pytest.raises(ConfigError, match="did you mean opdvr"):
        train(tmp_path, "opdvrr")
    with pytest.raises(ConfigError, match="num_generations is 1"):
        train(tmp_path, "grpo", num_generations=1)
    method = {"name": "mix", "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opd"}}]}
    with pytest.raises(ConfigError, match="loss_type 'grpo'"):
        train(tmp_path, method_of(method), loss_type="grpo")


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        ("grpo", {"scale_rewards": "none"}, "scale_rewards 'none' would change nothing: .*; use its `scale`"),
        ("opdvr", {"scale_rewards": "batch"}, "leave scale_rewards out"),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, "weighted sum of the rewards"),
        ("grpo_opd", {"epsilon": 0.1}, None),
        ({"name": "opd", "estimator": "reverse_kl"}, {"epsilon": 0.1}, "epsilon would change nothing.* opd has none"),
        ({"name": "mix", "parts": [{"method": {"name": "grpo"}}, {"method": {"name": "opd"}}]},
         {"top_entropy_quantile": 0.5}, "top_entropy_quantile would change nothing.* mix has none or several"),
        ({"name": "opd", "estimator": "k2"}, {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold would"),
    ],
)  # fmt: skip
def test_a_field_of_trl_that_would_change_nothing_is_refused(tmp_path, method, settings, told):
    args = HybridConfig(str(tmp_path), num_generations=4, use_cpu=True, bf16=False, **settings)
    if told is None:
        refuse_idle(method_of(method), args)
        return
    with pytest.raises(ConfigError, match=told):
        HybridTrainer(model(0), method=method, teacher=None, reward_funcs=[coin], args=args)


def test_a_data_set_without_a_single_step_is_refused(tmp_path):
    args = HybridConfig(str(tmp_path), num_generations=2, use_cpu=True, bf16=False)  # 8 responses of 4 prompts
    with pytest.raises(ConfigError, match="a step takes 4 different prompts, and train_dataset has 3; give more"):
        HybridTrainer(model(0), "grpo", reward_funcs=[coin], args=args, train_dataset=prompts(3))


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    other = tokenizer()
    other.add_tokens(["+1"])
    with pytest.raises(PreflightFailed, match=r"token '\+1' is unknown for the student"):
        train(tmp_path, "opdvr", teacher=LocalTeacher(model(1, vocab_size=60), other))


def test_a_teacher_that_ends_otherwise_is_worth_a_warning(tmp_path, caplog):
    ends, pads = tokenizer(), tokenizer()
    ends.eos_token, pads.pad_token = "#", "#"
    for other, told in ((ends, "eos_token_id is 1 and 15"), (pads, None)):
        caplog.clear()
        trainer = train(tmp_path, "opdvr", teacher=LocalTeacher(model(1), other), steps=1)
        assert trainer.state.global_step == 1
        assert ("special tokens" in caplog.text) == (told is not None)
        assert told is None or told in caplog.text


def test_what_is_told_of_a_run_is_told_of_its_method(tmp_path):
    """The table of completions has the advantages that train, the card the method; TRL's would be those of GRPO."""
    seen = []
    trainer = train(tmp_path, "opdvr", steps=1, watch=seen.append)
    advantage_BT, mask_BT = seen[0].assignment.terms[0].value_BT, seen[0].batch.mask_BT
    means = [row[mask].mean().item() for row, mask in zip(advantage_BT, mask_BT, strict=True)]
    assert list(trainer._logs["advantages"]) == pytest.approx(means)
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "trained with opdvr, a method introduced in [On-policy distillation with verifiable reward]" in card
    assert "papers/2608.24696" in card
    assert "DeepSeekMath" not in card


def test_another_loss_type_logs_no_policy_sum_but_the_loss(tmp_path):
    plain, reduced = (
        train(tmp_path / kind, "opdvr", steps=1, loss_type=kind).state.log_history[0] for kind in ("dapo", "grpo")
    )
    assert plain["loss/policy"] == pytest.approx(plain["loss"], abs=1e-6)
    assert "loss/policy" not in reduced


def test_the_example_of_the_readme_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")):
        model(seed).save_pretrained(name)
        tokenizer().save_pretrained(name)
    prompts().to_json("prompts.jsonl")
    names = {}
    quick = 'HybridConfig("out", max_steps=1, max_completion_length=8, save_strategy="no",'
    exec(examples("README.md")[0].replace('HybridConfig("out",', quick), names)
    (entry,) = names["trainer"].state.log_history
    assert entry["rewards/math/mean"] == 0  # nothing of a random model stands in a box
    assert 0 < entry["kept/outcome_agrees"] < 1


def test_a_method_without_reward_needs_no_reward_function(tmp_path):
    assert history(train(tmp_path, "opd", rewards=()), "loss")


class Counting:
    """A local teacher that notes how many rows it was asked about."""

    name = "counting"

    def __init__(self):
        self.inner, self.asked = LocalTeacher(model(1), tokenizer()), []

    def score(self, rows, want=SAMPLED):
        self.asked.append(len(rows))
        return self.inner.score(rows, want)

    def close(self):
        self.inner.close()


def half(completions, **columns):
    return [0.5 for _ in completions]


@pytest.mark.parametrize(("settings", "asked"), [({}, []), ({"fail_thr": 0.5}, [8]), ({"finished_only": True}, [8])])
def test_rstg_asks_about_the_groups_that_it_may_guide(tmp_path, settings, asked):
    teacher = Counting()
    method = {"name": "rstg", "sft": "off", **settings}
    args = HybridConfig(
        output_dir=str(tmp_path), max_steps=1, max_completion_length=8, seed=3, disable_tqdm=True, save_strategy="no",
        use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
    )  # fmt: skip
    rows = prompts().add_column("teacher_accuracy", [0.5] * 24)  # pyright: ignore[reportCallIssue]
    HybridTrainer(
        model(0), method=method_of(method), teacher=teacher, reward_funcs=[half], args=args, train_dataset=rows,
        processing_class=tokenizer(),
    ).train()  # fmt: skip
    assert teacher.asked == asked


def test_an_entropy_bonus_pulls_beside_a_divergence(tmp_path):
    """TRL's `entropy_coef` trains with every method: the gradient is that of the loss which is logged."""
    method = {"name": "opd", "estimator": "reverse_kl"}
    runs = [train(tmp_path / str(c), method, steps=1, entropy_coef=c, max_grad_norm=1e9) for c in (0.0, 0.5, 1.0)]
    (plain, entropy), (half, _), (whole, _) = (history(run, "loss", "entropy")[0] for run in runs)
    assert half == pytest.approx(plain - 0.5 * entropy, abs=1e-5)
    assert whole == pytest.approx(plain - entropy, abs=1e-5)
    norms = [history(run, "grad_norm")[0][0] for run in runs]
    assert min(abs(norms[0] - norms[1]), abs(norms[1] - norms[2])) > 1e-3
