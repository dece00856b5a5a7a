"""Teachers as an experiment's settings make them: what they are asked, under which prompts, and by whom."""

import json
from contextlib import ExitStack

import pytest
import torch
from datasets import Dataset
from transformers import MistralConfig, MistralForCausalLM

from hybrid.config import ExperimentConfig
from hybrid.contexts import Writer
from hybrid.errors import ConfigError
from hybrid.rollouts import Rollout
from hybrid.teaching import Making, is_chat, largest_own_support, taught, teacher_of
from teachers.alignment import end_of_turn, paired_ends
from teachers.errors import TeacherError
from teachers.protocol import Row
from tests.teachers.test_alignment import byte_fallback, byte_level

STUDENT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}{{ 'assistant: ' }}"
TEACHER_TEMPLATE = "<bos>{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{{ '> ' }}"
CHAT = [{"role": "user", "content": "the word"}]


def save(tokenizer, folder, template=None):
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save(byte_level(), tmp_path_factory.mktemp("student"), STUDENT_TEMPLATE)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save(byte_fallback(), tmp_path_factory.mktemp("other"), TEACHER_TEMPLATE)


def experiment(student, **changes):
    settings = {"name": "t", "student": {"model": student}, "method": {"name": "opd"}, "data": {"source": "x.jsonl"}}
    return ExperimentConfig.model_validate(settings | changes)


def rollout(prompt, student_ids=(5, 6), completion_ids=(7, 8), **columns):
    return Rollout(
        prompt=prompt,
        prompt_ids=tuple(student_ids),
        completion_ids=tuple(completion_ids),
        text="the",
        group=0,
        position=0,
        reward=1.0,
        columns=columns,
    )


@pytest.fixture
def making(student, tmp_path):
    with ExitStack() as stack:
        yield lambda config, chat=False: Making.of(config, stack, folder=tmp_path, student=student, chat=chat)


def test_a_chat_is_written_for_an_aligned_teacher_with_its_own_template_and_ids(student, other, making):
    config = experiment(student, teacher={"model": other, "align": True})
    teacher = taught(config.teacher, "teacher", making(config, chat=True))
    (prompt,) = teacher.context(Writer(tokenizer=byte_level()))([rollout(CHAT)], [rollout(CHAT)])
    assert byte_fallback().decode(prompt.prompt_ids) == "<bos>the word<eos>> "


def test_a_plain_prompt_begins_with_the_aligned_teachers_own_bos(student, other, making):
    config = experiment(student, teacher={"model": other, "align": True})
    teacher = taught(config.teacher, "teacher", making(config))
    (prompt,) = teacher.context(Writer(tokenizer=byte_level()))([rollout("the word")], [rollout("the word")])
    assert prompt.prompt_ids[0] == byte_fallback().bos_token_id
    assert byte_fallback().decode(prompt.prompt_ids[1:]) == "the word"


def test_an_aligned_teachers_style_is_its_own(student, other, making):
    block = {"model": other, "align": True, "prompt": {"system": "be brief"}}
    config = experiment(student, teacher=block)
    teacher = taught(config.teacher, "teacher", making(config, chat=True))
    (prompt,) = teacher.context(Writer(tokenizer=byte_level()))([rollout(CHAT)], [rollout(CHAT)])
    assert byte_fallback().decode(prompt.prompt_ids) == "<bos>be brief<eos>the word<eos>> "


def test_ends_of_a_turn_belong_together_in_a_chat_alone():
    own, other = byte_level(), byte_fallback()
    own.chat_template = "{% for m in messages %}{{ m['content'] }}<tool>{% endfor %}"
    other.chat_template = "{% for m in messages %}{{ m['content'] }}<bos>{% endfor %}"
    tool = own.convert_tokens_to_ids("<tool>")
    assert end_of_turn(own) == tool
    assert paired_ends(own, other) == {own.eos_token_id: other.eos_token_id}
    assert paired_ends(own, other, chat=True) == {own.eos_token_id: other.eos_token_id, tool: other.bos_token_id}


def test_a_template_without_an_end_of_turn_has_none():
    own = byte_level()
    own.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert end_of_turn(own) is None


def test_each_of_several_teachers_sees_its_own_prompt(student, other, tmp_path):
    teachers = {"same": {"model": student}, "other": {"model": other, "align": True}}
    config = experiment(student, teacher={"teachers": teachers, "by": "topic"})
    with teacher_of(config, folder=tmp_path, student=student) as routed:
        context = routed.parts["other"].context(Writer(tokenizer=byte_level()))
        rows = [rollout("the word", topic="same"), rollout("the word", topic="other")]
        seen = context(rows, rows)[1]
        own = Row(prompt_ids=seen.prompt_ids, completion_ids=rows[1].completion_ids)
        asked = [
            Row(prompt_ids=r.prompt_ids, completion_ids=r.completion_ids, labels=(("topic", r.columns["topic"]),),
                seen_by=(("other", own),))
            for r in rows
        ]  # fmt: skip
        scores = routed.teacher.score(asked)
        alone = routed.teacher.teachers["other"].score([own])
    assert scores.logprob_BT[1].tolist() == alone.logprob_BT[0].tolist()
    assert scores.valid_BT[0].all()


def test_recorded_teachers_are_known_by_their_names_in_the_file(student, tmp_path):
    blocks = {}
    for name, prompt_ids, logprob in (("a", [1], -0.5), ("b", [2], -1.5)):
        record = {"prompt_ids": prompt_ids, "completion_ids": [3], "logprobs": [logprob]}
        (tmp_path / name).write_text(json.dumps(record) + "\n")
        blocks[name] = {"recorded": str(tmp_path / name)}
    config = experiment(student, teacher={"teachers": blocks, "weights": {"a": 3.0, "b": 1.0}})
    row = Row(prompt_ids=(1,), completion_ids=(3,), seen_by=(("b", Row(prompt_ids=(2,), completion_ids=(3,))),))
    with teacher_of(config, folder=tmp_path, student=student) as weighted:
        scores = weighted.teacher.score([row])
    assert scores.parts.keys() == {"a", "b"}
    assert scores.logprob_BT.tolist() == [[(3 * -0.5 + -1.5) / 4]]


def test_a_self_teacher_stands_alone(student, tmp_path):
    teachers = {"own": {"self": {"sync": "live"}}, "other": {"model": student}}
    config = experiment(student, teacher={"teachers": teachers, "weights": {"own": 1.0, "other": 1.0}})
    with pytest.raises(ConfigError, match="stands alone"), teacher_of(config, folder=tmp_path, student=student):
        pass


def test_a_served_teacher_is_never_sent_an_id_that_it_does_not_know(student, making):
    config = experiment(student, teacher={"model": student, "url": "http://127.0.0.1:9"})
    teacher = taught(config.teacher, "teacher", making(config)).teacher
    too_large = len(byte_level())
    with pytest.raises(TeacherError, match=str(too_large)):
        teacher.score([Row(prompt_ids=(1,), completion_ids=(too_large,))])


def test_a_served_teacher_trusts_the_certificates_that_it_is_told(student, tmp_path, making):
    (tmp_path / "torn.pem").write_text("no certificate")
    for name in ("none.pem", "torn.pem"):
        requests = {"ca_file": str(tmp_path / name)}
        config = experiment(student, teacher={"model": student, "url": "https://127.0.0.1:9", "requests": requests})
        with pytest.raises(TeacherError, match=name):
            taught(config.teacher, "teacher", making(config))


@pytest.mark.parametrize("compress", [True, False])
def test_a_served_teacher_asks_for_compressed_replies_as_it_is_told(student, server, compress, making):
    config = experiment(student, teacher={"model": student, "url": server.url, "requests": {"compress": compress}})
    teacher = taught(config.teacher, "teacher", making(config)).teacher
    with pytest.raises(TeacherError):  # it serves another model
        teacher.score([Row(prompt_ids=(1,), completion_ids=(2,))])
    assert ("gzip" in server.headers[-1].get("Accept-Encoding", "")) is compress


def test_a_server_must_hold_as_many_log_probs_as_the_methods_ask_for(student, making):
    method = {"name": "opd", "estimator": "forward_kl", "support": "teacher", "top_k": 64}
    config = experiment(student, teacher={"model": student, "url": "http://127.0.0.1:9"}, method=method)
    assert making(config).top_k == 64
    candidates = {"name": "opdvr", "top_k": 48}
    config = experiment(student, teacher={"model": student, "url": "http://127.0.0.1:9"}, method=candidates)
    assert making(config).top_k == 48
    assert largest_own_support(config) == 0
    method = {"name": "mix", "parts": [{"method": {"name": "grpd", "top_k": 32, "support": "intersection"}}]}
    config = experiment(student, teacher={"model": student, "url": "http://127.0.0.1:9"}, method=method)
    assert (making(config).top_k, largest_own_support(config)) == (32, 32)


def test_chats_are_told_from_plain_prompts():
    assert is_chat(Dataset.from_list([{"prompt": CHAT}]))
    assert not is_chat(Dataset.from_list([{"prompt": "the word"}]))


def test_scores_are_kept_for_later_runs_where_a_folder_is_given(student, other, tmp_path):
    block = {"model": other, "align": True, "cache": str(tmp_path / "scores")}
    row = Row(prompt_ids=(1, 2), completion_ids=(5, 6))
    asked = []
    for _ in range(2):
        with teacher_of(experiment(student, teacher=block), folder=tmp_path, student=student) as own:
            asked.append(own.teacher.score([row]))
    assert [(scores.stats["cache_hits"], scores.stats["cache_misses"]) for scores in asked] == [(0, 1), (1, 0)]
    assert asked[0].logprob_BT.tolist() == asked[1].logprob_BT.tolist()
