"""KAT ends responses while they are written, exactly where it would have cut them afterwards."""

from typing import Any

import pytest
import torch

from hybrid.collect import Scorer
from hybrid.errors import ConfigError
from hybrid.explain import explain
from hybrid.generation import StepWatch
from hybrid.methods import method_of
from hybrid.objective.kl_trap import TrapState, online_stop, token_divergence, trap_cut
from hybrid.records import read_records
from hybrid.tiny_vision import vision_processor
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.training import training_rewards
from hybrid.watching import rollout_lines
from teachers.cache import CachedTeacher
from teachers.local import LocalTeacher
from tests.tiny_models import coin, model, prompts, tokenizer
from tests.tiny_vision_models import pictured_prompts, vision_model

TRAP = {"window": 3, "patience": 2, "n_exempt": 2, "min_samples": 1, "warmup_steps": 0, "eta": 0.5}
LENGTH = 24


def built(
    tmp_path, *, teacher=None, rewards=(), tokens=None, student=None, data=None, watch=None, **settings: Any
) -> HybridTrainer:
    own: dict[str, Any] = {
        key: settings.pop(key) for key in ("max_steps", "mask_truncated_completions", "seed") if key in settings
    }
    own = {"max_steps": 1, "seed": 1} | own
    args = HybridConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=LENGTH,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **own,
    )
    return HybridTrainer(
        student or model(0),
        method=method_of({"name": "kat", **TRAP, **settings}),
        teacher=teacher or LocalTeacher(model(1), tokenizer()),
        reward_funcs=list(rewards) or None,
        args=args,
        train_dataset=data or prompts(),
        processing_class=tokens or tokenizer(),
        watch=watch,
    )


def written(tmp_path, threshold, **settings: Any) -> tuple[StepWatch, Any]:
    """The first batch under a threshold: what was recorded, and the trainer."""
    seen: list[StepWatch] = []
    trainer = built(tmp_path, watch=seen.append, **settings)
    if threshold is not None:
        trainer.method_state = {"kl_minima": [threshold]}
    trainer.train()
    return seen[0], trainer


def kept(watch):
    return watch.assignment.terms[0].kept_BT.sum(1).tolist()


def completions(watch):
    return [rollout.completion_ids for rollout in watch.rollouts]


def logged(trainer, name):
    return [entry.get(name) for entry in trainer.state.log_history if "loss" in entry]


CASES = {
    "the student's top 16": {"top_k": 16},
    "the full vocabulary": {"top_k": 0},
    "k1": {"estimator": "k1"},
    "k3": {"estimator": "k3"},
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_token_by_token_keeps_what_the_mask_keeps(tmp_path, case):
    settings = CASES[case]
    free, trainer = written(tmp_path, None, online=False, **settings)
    threshold = sorted(trainer.method_state["kl_minima"])[8]
    whole, masked = written(tmp_path, threshold, online=False, **settings)
    short, stopped = written(tmp_path, threshold, online="auto", **settings)
    assert completions(free) == completions(whole)
    assert kept(short) == kept(whole)
    lengths = [len(ids) for ids in completions(short)]
    for ids, entire in zip(completions(short), completions(whole), strict=True):
        assert entire[: len(ids)] == ids
    assert sum(lengths) < sum(len(ids) for ids in completions(whole))
    assert logged(stopped, "loss") == pytest.approx(logged(masked, "loss"), rel=1e-5)
    assert logged(stopped, "kl_trap/stopped")[0] > 0
    assert logged(masked, "kl_trap/stopped") == [None]


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks_end_at_the_token_that_fires(tmp_path, chunk):
    _, trainer = written(tmp_path, None, online=False)
    threshold = sorted(trainer.method_state["kl_minima"])[8]
    watch, trainer = written(tmp_path, threshold, online=True, online_chunk=chunk)
    trap = trainer.method.trap
    value_BT = token_divergence(watch.batch, "kl").double()
    ended_early = 0
    for row, ids in enumerate(completions(watch)):
        state, fired_at = TrapState(), None
        for place, value in enumerate(value_BT[row, : len(ids)].tolist()):
            state, fired = online_stop(state, value, trap=trap, threshold=threshold)
            if fired:
                fired_at = place
                break
        # a response goes on to its trigger, to its end token, or to the limit
        assert fired_at in (None, len(ids) - 1)
        assert fired_at is not None or ids[-1] == 1 or len(ids) == LENGTH
        assert kept(watch)[row] == trap_cut(value_BT[row, : len(ids)], trap=trap, threshold=threshold)
        ended_early += fired_at is not None
    assert logged(trainer, "kl_trap/stopped") == [pytest.approx(ended_early / len(value_BT))]
    assert ended_early > 0


def test_generation_ends_with_the_last_response(tmp_path):
    """With every window low and nothing exempt, all responses end at the first trigger, and the forwards are saved."""
    forwards = []
    for online in (False, True):
        student, calls = model(0), []
        student.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        watch, _ = written(tmp_path, 100.0, online=online, n_exempt=0, student=student)
        forwards.append(len(calls))
    first = TRAP["window"] + TRAP["patience"] - 1
    assert max(len(ids) for ids in completions(watch)) == first
    assert forwards[0] - forwards[1] == LENGTH - first


def test_an_end_token_that_is_the_padding_is_not_added_to_a_stopped_response(tmp_path):
    tokens = tokenizer()
    tokens.pad_token = tokens.eos_token
    watch, _ = written(tmp_path, 100.0, online=True, n_exempt=0, tokens=tokens)
    for ids in completions(watch):
        assert len(ids) <= TRAP["window"] + TRAP["patience"] - 1
        assert tokens.eos_token_id not in ids[:-1]
    assert any(tokens.eos_token_id != ids[-1] for ids in completions(watch))


def test_nothing_is_stopped_before_the_memory_is_full(tmp_path):
    watch, trainer = written(tmp_path, 100.0, online=True, n_exempt=0, warmup_steps=1)
    assert max(len(ids) for ids in completions(watch)) == LENGTH
    assert logged(trainer, "kl_trap/stopped") == [None]


def test_the_student_generates_as_before_afterwards(tmp_path):
    student: Any = model(0)
    written(tmp_path, 100.0, online=True, n_exempt=0, student=student)
    assert "generate" not in vars(student)
    assert student.generate(torch.tensor([[3, 4]]), max_new_tokens=9, min_new_tokens=9, do_sample=False).shape == (
        1,
        11,
    )


def test_a_reward_rules_the_online_stop_out(tmp_path):
    watch, trainer = written(tmp_path, 100.0, online="auto", n_exempt=0, rewards=(coin,))
    assert max(len(ids) for ids in completions(watch)) == LENGTH
    assert logged(trainer, "kl_trap/stopped") == [None]
    long = [n for n, ids in zip(kept(watch), completions(watch), strict=True) if len(ids) > TRAP["window"]]
    assert set(long) == {1}  # masked all the same: what stays is min_keep
    with pytest.raises(ConfigError, match=r"online: true cannot be had: the run has a reward, .* has no answer"):
        built(tmp_path, online=True, rewards=(coin,))


def test_what_cannot_stop_online_says_why(tmp_path):
    local = LocalTeacher(model(1), tokenizer())
    shown = Scorer(teacher=local, context=lambda own, everyone: [None for _ in own])
    reasons: dict[str, dict[str, Any]] = {
        "only student and full can be measured": {"support": "teacher"},
        "leaves out every response that was stopped": {"mask_truncated_completions": True},
        "the teacher sees another prompt": {"teacher": {"teacher": shown}},
    }
    for reason, settings in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            built(tmp_path, online=True, **settings)
        assert built(tmp_path, online="auto", **settings)._online is None
    with pytest.raises(ConfigError, match="the teacher is a CachedTeacher, and only a local model reads along"):
        built(tmp_path, online=True, teacher=CachedTeacher(local, tmp_path / "cache"))
    with pytest.raises(ValueError, match="kat with online: true ends responses that the other parts want whole"):
        method_of({"name": "mix", "parts": [{"method": {"name": "kat", "online": True}}, {"method": {"name": "opd"}}]})


def test_a_record_of_stopped_responses_explains_itself(tmp_path):
    states = {}

    def remember(watch):
        states[watch.step] = dict(watch.state)
        (tmp_path / f"step{watch.step}.jsonl").write_text("\n".join(rollout_lines(watch, tokenizer())) + "\n")

    trainer: Any = built(tmp_path, watch=remember, max_steps=6)
    trainer.train()
    assert any(logged(trainer, "kl_trap/stopped"))
    for step, value in enumerate(logged(trainer, "loss/kl")):
        records = read_records(tmp_path / f"step{step}.jsonl")
        explained = explain(trainer.method, records, step=step, state=states[step])
        assert value == pytest.approx(explained["loss"]["kl"], abs=1e-5, rel=1e-5)


def test_responses_to_pictures_are_stopped_too(tmp_path):
    processor = vision_processor()
    settings: dict[str, Any] = {
        "teacher": LocalTeacher(vision_model("qwen3_vl", 1), processor.tokenizer, processor=processor),
        "tokens": processor,
        "data": pictured_prompts(),
    }
    _, trainer = written(tmp_path, None, online=False, student=vision_model("qwen3_vl", 0), **settings)
    threshold = sorted(trainer.method_state["kl_minima"])[8]
    whole, _ = written(tmp_path, threshold, online=False, student=vision_model("qwen3_vl", 0), **settings)
    short, _ = written(tmp_path, threshold, online=True, student=vision_model("qwen3_vl", 0), **settings)
    assert kept(short) == kept(whole)
    assert sum(map(len, completions(short))) < sum(map(len, completions(whole)))
    with pytest.raises(ConfigError, match="the student reads pictures"):
        built(tmp_path, online=True, online_chunk=4, student=vision_model("qwen3_vl", 0), **settings)


def test_an_experiment_that_asks_for_it_keeps_its_rewards_for_the_evaluation():
    asked, left, other = (method_of(m) for m in ({"name": "kat", "online": True}, "kat", "grpo"))
    assert training_rewards(asked, [coin]) == []
    assert training_rewards(left, [coin]) == [coin]
    assert training_rewards(other, [coin]) == [coin]
