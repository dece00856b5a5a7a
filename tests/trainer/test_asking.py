"""What passes between a training and its teachers: when they are asked, what is shown, what a failure leaves."""

import threading

import pytest
import torch
from datasets import Dataset

from hybrid.asking import prompts_shown
from hybrid.contexts import Writer
from hybrid.methods import method_of
from hybrid.methods.base import ViewSpec
from hybrid.rollouts import Rollout
from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.views import Taught, taught_scorer
from teachers.contexts import ContextTooLong
from teachers.errors import TeacherUnavailable
from teachers.local import LocalTeacher
from teachers.protocol import SAMPLED
from teachers.router import RoutedTeacher, WeightedTeachers
from tests.tiny_models import coin, model, prompts, tokenizer


def make(folder, method, teacher, *, steps=1, rows=None, rewards=(coin,), kind=HybridTrainer, **more):
    args = HybridConfig(
        output_dir=str(folder), max_steps=steps, max_completion_length=6, seed=3, disable_tqdm=True, logging_steps=1,
        save_strategy="no", use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        learning_rate=1e-2,
    )  # fmt: skip
    return kind(
        model(0), method=method_of(method), teacher=teacher, reward_funcs=list(rewards) or None, args=args,
        train_dataset=rows or prompts(), processing_class=tokenizer(), **more,
    )  # fmt: skip


def local(seed=1, name="teacher"):
    return LocalTeacher(model(seed), tokenizer(), name=name)


class Elsewhere:
    """A local teacher in the place of one on another machine: it answers when the student has begun its own pass."""

    name, is_remote = "elsewhere", True

    def __init__(self):
        self.inner, self.student_runs, self.asked = local(), threading.Event(), []

    def score(self, rows, want=SAMPLED):
        self.asked.append(len(rows))
        assert self.student_runs.wait(240), "the student waited for its teacher"
        return self.inner.score(rows, want)

    def close(self):
        self.inner.close()


class Watched(HybridTrainer):
    def _run(self, *args):
        self.scorers["teacher"].teacher.student_runs.set()
        return super()._run(*args)


def test_a_teacher_elsewhere_works_while_the_student_does(tmp_path):
    teacher = Elsewhere()
    make(tmp_path, {"name": "opd"}, teacher, kind=Watched, watch=lambda step: None).train()
    assert teacher.asked == [8]


def test_a_prompt_of_each_privileged_view_is_shown_once(tmp_path):
    said = []
    teacher = Taught(teacher=local(), spec=ViewSpec("teacher", "column", {"column": "shown"}))
    rows = Dataset.from_dict({"prompt": ["a=", "b="] * 8, "shown": ["aa=", "bb="] * 8})
    make(tmp_path, {"name": "opd"}, teacher, rows=rows, steps=2, say=said.append).train()
    (line,) = said
    assert line.startswith("the view teacher sees: ")
    assert line.replace(" ", "").endswith(("'aa='", "'bb='"))


def shown_by(teacher, parts, rollouts):
    writer = Writer(tokenizer=tokenizer())
    scorer = taught_scorer(Taught(teacher=teacher, spec=ViewSpec("teacher"), parts=parts), writer, lambda options: None)
    texts = prompts_shown({"teacher": scorer}, rollouts, rollouts, tokenizer())
    return [text.replace(" ", "") for text in texts]


def asked_by(topic, prompt, **columns):
    ids = tuple(tokenizer().encode(prompt))
    return Rollout(
        prompt=prompt, prompt_ids=ids, completion_ids=(3,), text="1", group=0, position=0, reward=0.0,
        columns={"topic": topic, **columns},
    )  # fmt: skip


def part(name, column=None):
    spec = ViewSpec("teacher") if column is None else ViewSpec("teacher", "column", {"column": column})
    return Taught(teacher=local(name=name), spec=spec)


def test_a_prompt_of_each_of_several_teachers_is_shown_as_it_sees_it():
    parts = {"x": part("x", "long"), "y": part("y"), "z": part("z", "short")}
    teachers = {name: own.teacher for name, own in parts.items()}
    rollouts = [
        asked_by("y", "b=", long="no", short="none"),
        asked_by("x", "a=", long="aaa=", short="no"),
        asked_by("x", "c=", long="ccc=", short="no"),
    ]
    # z has no row of its own yet: it is shown as it would see the first
    assert shown_by(RoutedTeacher(teachers, "topic"), parts, rollouts) == [
        "theteacherxoftheviewteachersees:'aaa='",
        "theteacheryoftheviewteachersees:'b='",
        "theteacherzoftheviewteachersees:'none'",
    ]


def test_weighted_teachers_are_shown_with_a_row_that_all_see():
    parts = {"x": part("x", "long"), "y": part("y")}
    weighted = WeightedTeachers([(1.0, own.teacher) for own in parts.values()])
    rollouts = [asked_by("y", "b=", long=None), asked_by("x", "a=", long="aaa=")]
    assert shown_by(weighted, parts, rollouts) == [
        "theteacherxoftheviewteachersees:'aaa='",
        "theteacheryoftheviewteachersees:'a='",
    ]


def logged(trainer):
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


def test_each_teachers_share_and_gap_are_logged(tmp_path):
    teachers = {"x": local(0, "x"), "y": local(1, "y")}
    rows = Dataset.from_dict({"prompt": ["a=", "b="] * 8, "topic": ["x", "y"] * 8})
    trainer = make(tmp_path, {"name": "opd"}, RoutedTeacher(teachers, "topic"), rows=rows, watch=lambda step: None)
    trainer.train()
    entry = logged(trainer)
    assert entry["teacher/x/share"] == entry["teacher/y/share"] == 0.5
    assert entry["teacher/x/gap"] == pytest.approx(0, abs=1e-6)  # it has the student's weights
    assert entry["teacher/y/gap"] < -0.01


def test_weighted_teachers_log_theirs_too(tmp_path):
    weighted = WeightedTeachers([(3.0, local(1, "x")), (1.0, local(2, "y"))])
    trainer = make(tmp_path, {"name": "opd"}, weighted, watch=lambda step: None)
    trainer.train()
    entry = logged(trainer)
    assert entry["teacher/x/share"] == 0.5
    assert entry["gap/mean"] == pytest.approx(0.75 * entry["teacher/x/gap"] + 0.25 * entry["teacher/y/gap"], abs=1e-5)


class Failing:
    """Scores a number of batches, and then cannot be reached."""

    name = "failing"

    def __init__(self, batches):
        self.inner, self.left = local(), batches

    def score(self, rows, want=SAMPLED):
        self.left -= 1
        if self.left < 0:
            raise TeacherUnavailable("teacher 'failing' does not answer")
        return self.inner.score(rows, want)

    def close(self):
        self.inner.close()


def losses(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def test_a_teacher_that_is_lost_leaves_a_checkpoint_from_which_the_same_numbers_follow(tmp_path):
    unbroken = make(tmp_path / "whole", {"name": "opdvr"}, local(), steps=5)
    unbroken.train()
    said = []
    broken = make(tmp_path / "broken", {"name": "opdvr"}, Failing(3), steps=5, say=said.append)
    with pytest.raises(TeacherUnavailable):
        broken.train()
    assert said == ["the teacher failed; a checkpoint of step 3 is kept, from which --resume goes on"]
    resumed = make(tmp_path / "broken", {"name": "opdvr"}, local(), steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
    assert losses(resumed) == losses(unbroken)
    for one, other in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_teacher_that_never_answers_leaves_nothing_to_go_on_from(tmp_path):
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, {"name": "opdvr"}, Failing(0)).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_privileged_prompt_that_does_not_fit_is_refused_and_never_cut(tmp_path):
    teacher = Taught(teacher=local(), spec=ViewSpec("teacher", "hint", {"column": "hint"}))
    rows = Dataset.from_dict({"prompt": ["a=", "b="] * 8, "hint": ["x" * 300] * 16})
    with pytest.raises(ContextTooLong, match=r"the teacher takes 256"):
        make(tmp_path, {"name": "opd"}, teacher, rows=rows).train()
