import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from teachers.errors import TeacherError
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from teachers.scoring import ScoreSettings
from teachers.selves import AdapterOffTeacher, EmaTeacher, LiveTeacher, SnapshotTeacher, refuse_identical
from teachers.shadow import ShadowWeights

ROWS = [Row(prompt_ids=(3, 4, 5), completion_ids=(8, 9, 10)), Row(prompt_ids=(11, 12), completion_ids=(13,))]

# peft reads a property that transformers 5.24 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def scores_of(model):
    return LocalTeacher(copy.deepcopy(model)).score(ROWS).logprob_BT


def train_a_step(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def lora(make_qwen):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(make_qwen(), config)


def test_the_live_teacher_is_the_student_itself_and_leaves_it_as_it_was(make_qwen):
    model = make_qwen().train()
    teacher = LiveTeacher(model)
    assert isinstance(teacher, Teacher)
    assert_close(teacher.score(ROWS).logprob_BT, scores_of(model), rtol=0, atol=0)
    train_a_step(model)
    assert_close(teacher.score(ROWS).logprob_BT, scores_of(model), rtol=0, atol=0)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_live_teacher_under_the_students_prompt_is_refused(make_qwen):
    # pitfall 5: the gap would be zero at every token, and the run would look healthy
    context = [Row(prompt_ids=(7, 7, *row.prompt_ids), completion_ids=row.completion_ids) for row in ROWS]
    refuse_identical(context, ROWS, live=LiveTeacher.is_live)
    refuse_identical(ROWS, ROWS, live=SnapshotTeacher.is_live)
    with pytest.raises(TeacherError, match="row 1: the teacher is the live student and sees the student's own prompt"):
        refuse_identical([context[0], ROWS[1]], ROWS, live=True)
    with pytest.raises(ValueError, match="longer"):
        refuse_identical(context[:1], ROWS, live=True)


def test_the_same_prompt_with_a_degraded_image_is_another_view():
    seen = Row(prompt_ids=(1, 2), completion_ids=(3,), images=("sharp",))
    refuse_identical([Row(prompt_ids=(1, 2), completion_ids=(3,), images=("blurred",))], [seen], live=True)
    with pytest.raises(TeacherError, match="row 0"):
        refuse_identical([seen], [seen], live=True)


def test_the_snapshot_follows_every_n_steps(make_qwen):
    model = make_qwen()
    teacher = SnapshotTeacher(model, every=2)
    at_start = scores_of(model)
    train_a_step(model, 1)
    teacher.after_update(1)
    assert_close(teacher.score(ROWS).logprob_BT, at_start, rtol=0, atol=0)
    train_a_step(model, 2)
    teacher.after_update(2)
    at_two = scores_of(model)
    train_a_step(model, 3)
    teacher.after_update(2)  # told twice, as when a resumed run repeats a call
    teacher.after_update(3)
    assert_close(teacher.score(ROWS).logprob_BT, at_two, rtol=0, atol=0)
    assert not torch.equal(at_start, at_two)
    teacher.after_update(5)  # step 4 was not told: 5 has passed it
    assert_close(teacher.score(ROWS).logprob_BT, scores_of(model), rtol=0, atol=0)


def test_scoring_with_other_weights_gives_the_student_its_own_back(make_qwen):
    model = make_qwen()
    teacher = SnapshotTeacher(model, every=10)
    train_a_step(model)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    teacher.score(ROWS)
    with pytest.raises(TeacherError, match="row 0 has an empty prompt"):
        teacher.score([Row(prompt_ids=(), completion_ids=(1,))])
    for name, parameter in model.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, value)


def test_the_snapshot_is_not_the_live_student_where_trl_has_patched_its_forward(make_qwen):
    from trl.trainer.utils import add_fused_lm_head

    model = make_qwen()
    add_fused_lm_head(model)
    teacher = SnapshotTeacher(model, every=10)
    at_start = teacher.score(ROWS).logprob_BT
    train_a_step(model)
    assert_close(teacher.score(ROWS).logprob_BT, at_start, rtol=0, atol=0)
    assert (LiveTeacher(model).score(ROWS).logprob_BT - at_start).abs().max() > 0.1


def set_all(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_the_average_is_three_quarters_and_stays_so_after_a_resume(make_qwen):
    # pitfall 51: teacher 0.5, student 1.0, decay 0.5 -> 0.75; after a resume 0.75, not the student's 1.0
    model = make_qwen()
    set_all(model, 0.5)
    teacher = EmaTeacher(model, decay=0.5)
    set_all(model, 1.0)
    teacher.after_update(1)
    teacher.after_update(1)  # a repeated step does not count twice
    state = teacher.state_dict()
    assert all(torch.equal(value, torch.full_like(value, 0.75)) for value in state["weights"].values())

    resumed = EmaTeacher(model, decay=0.5)
    assert resumed.state_dict()["weights"]["lm_head.weight"].unique().item() == 1.0
    resumed.load_state_dict(state)
    assert resumed.state_dict()["weights"]["lm_head.weight"].unique().item() == 0.75
    assert_close(resumed.score(ROWS).logprob_BT, teacher.score(ROWS).logprob_BT, rtol=0, atol=0)
    resumed.after_update(1)
    assert resumed.state_dict()["weights"]["lm_head.weight"].unique().item() == 0.75
    resumed.after_update(2)
    assert resumed.state_dict()["weights"]["lm_head.weight"].unique().item() == 0.875


def test_a_slow_average_of_a_bfloat16_student_does_not_stand_still(make_qwen):
    # 0.001 * (1 - 0.5) vanishes beside 0.5 in bfloat16, whose neighbours are 0.0039 apart there
    model = make_qwen(dtype=torch.bfloat16)
    set_all(model, 0.5)
    teacher = EmaTeacher(model, decay=0.999)
    set_all(model, 1.0)
    for step in range(1, 101):
        teacher.after_update(step)
    value = teacher.state_dict()["weights"]["lm_head.weight"].unique().item()
    assert value == pytest.approx(1 - 0.5 * 0.999**100, abs=1e-5)
    assert teacher.score(ROWS).logprob_BT.isfinite().all()
    assert next(model.parameters()).dtype == torch.bfloat16


def test_a_snapshot_survives_a_checkpoint_in_a_file(make_qwen, tmp_path):
    model = make_qwen()
    teacher = SnapshotTeacher(model, every=2)
    train_a_step(model)
    teacher.after_update(1)
    expected = teacher.score(ROWS).logprob_BT
    torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    resumed = SnapshotTeacher(model, every=2)
    resumed.load_state_dict(torch.load(tmp_path / "teacher.pt", weights_only=True))
    assert_close(resumed.score(ROWS).logprob_BT, expected, rtol=0, atol=0)
    resumed.after_update(2)
    assert_close(resumed.score(ROWS).logprob_BT, scores_of(model), rtol=0, atol=0)


def test_a_lora_student_has_only_its_adapter_copied(lora):
    teacher = SnapshotTeacher(lora, every=10)
    assert all("lora_" in name for name in teacher.state_dict()["weights"])
    at_start = teacher.score(ROWS).logprob_BT
    train_a_step(lora)
    assert_close(teacher.score(ROWS).logprob_BT, at_start, rtol=0, atol=0)
    assert (LiveTeacher(lora).score(ROWS).logprob_BT - at_start).abs().max() > 1e-3


def test_adapter_off_is_the_base_model_before_and_after_training(lora, make_qwen):
    trained = {name for name, parameter in lora.named_parameters() if parameter.requires_grad}
    teacher = AdapterOffTeacher(lora)
    base = scores_of(make_qwen())
    assert_close(teacher.score(ROWS).logprob_BT, base, rtol=0, atol=1e-6)
    train_a_step(lora)
    assert_close(teacher.score(ROWS).logprob_BT, base, rtol=0, atol=1e-6)
    assert (LiveTeacher(lora).score(ROWS).logprob_BT - base).abs().max() > 1e-3
    assert {name for name, parameter in lora.named_parameters() if parameter.requires_grad} == trained
    with pytest.raises(TeacherError, match="has no adapter to switch off"):
        AdapterOffTeacher(make_qwen())


@pytest.mark.parametrize("kind", ["live", "snapshot", "ema", "base"])
def test_a_distribution_stays_as_it_was_when_the_student_learns(kind, make_qwen, lora):
    def teacher_of(model) -> LiveTeacher:
        if kind == "live":
            return LiveTeacher(model)
        return SnapshotTeacher(model, every=9) if kind == "snapshot" else EmaTeacher(model, decay=0.5)

    model = make_qwen()
    teacher = AdapterOffTeacher(lora) if kind == "base" else teacher_of(model)
    scores = teacher.score(ROWS, Want(distribution=True))
    assert scores.head is not None
    assert scores.hidden_BTH is not None
    train_a_step(lora if kind == "base" else model)
    logits_TV = scores.head(scores.hidden_BTH[0].requires_grad_())
    assert_close(torch.log_softmax(logits_TV, -1)[torch.arange(3), torch.tensor([8, 9, 10])], scores.logprob_BT[0])
    logits_TV.sum().backward()
    assert all(parameter.grad is None for parameter in (lora if kind == "base" else model).parameters())


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_base_model_s_head_stays_without_its_adapter(make_qwen, options):
    config = LoraConfig(**({"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options))
    student = get_peft_model(make_qwen(), config)
    train_a_step(student)
    scores = AdapterOffTeacher(student).score(ROWS, Want(distribution=True))
    assert_close(scores.logprob_BT, scores_of(make_qwen()), rtol=0, atol=1e-6)
    assert scores.head is not None
    assert scores.hidden_BTH is not None
    logprob_TV = torch.log_softmax(scores.head(scores.hidden_BTH[0]), -1)
    assert_close(logprob_TV[torch.arange(3), torch.tensor([8, 9, 10])], scores.logprob_BT[0])
    assert_close(LiveTeacher(student).score(ROWS).logprob_BT, scores_of(student), rtol=0, atol=1e-6)


def test_settings_reach_the_scores(make_qwen):
    settings = ScoreSettings(temperature=0.5, max_length=5, vocab_size=60)
    scores = LiveTeacher(make_qwen(), settings=settings).score(ROWS)
    assert scores.temperature == 0.5
    assert set(scores.failures) == {0}


def test_what_a_self_teacher_cannot_do_is_refused_by_name(make_qwen):
    model = make_qwen()
    with pytest.raises(TeacherError, match="every must be at least 1 step; got 0"):
        SnapshotTeacher(model, every=0)
    with pytest.raises(TeacherError, match=r"decay must be in \[0, 1\); got 1"):
        EmaTeacher(model, decay=1.0)
    with pytest.raises(TeacherError, match=r"holds \['shard', 'step', 'weights'\] for teacher 'self'"):
        LiveTeacher(model).load_state_dict(EmaTeacher(model, decay=0.5).state_dict())
    with pytest.raises(TeacherError, match=r"holds \[\] for teacher 'ema'"):
        EmaTeacher(model, decay=0.5).load_state_dict({})
    elsewhere = EmaTeacher(model, decay=0.5).state_dict() | {"shard": (1, 2)}
    with pytest.raises(TeacherError, match=r"was saved as shard \(1, 2\) \(rank, ranks\) and is loaded as \(0, 1\)"):
        EmaTeacher(model, decay=0.5).load_state_dict(elsewhere)
    smaller: Any = make_qwen(vocab_size=60)
    with pytest.raises(
        TeacherError, match=r"'model\.embed_tokens\.weight' of the saved teacher has shape \(60, 32\), here it is"
    ):
        ShadowWeights(model).load_state_dict(ShadowWeights(smaller).state_dict())
    del smaller.lm_head
    with pytest.raises(TeacherError, match=r"'lm_head\.weight' is in only one of them"):
        ShadowWeights(model).load_state_dict(ShadowWeights(smaller).state_dict())
    with pytest.raises(TeacherError, match="no weight of Qwen2ForCausalLM is trained"):
        SnapshotTeacher(model.requires_grad_(False), every=1)


def test_a_copy_without_elements_is_refused(make_qwen):
    # pitfall 40: ZeRO-3 leaves empty tensors where it has handed the weights to other ranks
    model = make_qwen()
    model.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(TeacherError, match=r"'model\.norm\.weight' has no elements"):
        SnapshotTeacher(model, every=1)
