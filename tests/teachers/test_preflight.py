import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from teachers.cache import CachedTeacher
from teachers.contexts import fill, privileged_prompt, render
from teachers.errors import TeacherMismatch, TeacherUnavailable
from teachers.findings import PreflightFailed
from teachers.local import LocalTeacher
from teachers.preflight import preflight
from teachers.protocol import SAMPLED, Row, Want
from teachers.recorded import RecordedTeacher
from teachers.selves import LiveTeacher

CHAT = [{"role": "user", "content": "what is two plus two"}]


class Bent:
    """A teacher whose answers are changed on their way, as faulty transports do."""

    name = "bent"
    max_logprobs: int | None = None
    max_model_len: int | None = None
    model_name: str | None = None

    def __init__(self, inner, bend=lambda scores, rows: scores, **said):
        self._inner = inner
        self._bend = bend
        for attribute, value in said.items():
            setattr(self, attribute, value)

    def score(self, rows, want=SAMPLED):
        return self._bend(self._inner.score(rows, want), rows)

    def close(self):
        pass


@pytest.fixture
def local(make_qwen, tokenizer):
    return LocalTeacher(make_qwen(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def rows(tokenizer):
    prompt = render(CHAT, tokenizer).ids
    return [
        Row(prompt_ids=prompt, completion_ids=tuple(tokenizer("the answer is four")["input_ids"])),
        Row(prompt_ids=prompt[2:], completion_ids=(70, 71, 72)),
    ]


@pytest.fixture
def check(tokenizer, rows):
    def run(teacher, **options):
        settings: dict[str, Any] = {
            "student_tokenizer": tokenizer,
            "teacher_tokenizer": tokenizer,
            "sample_rows": rows,
            "max_length": 200,
            "tolerance": 1e-4,
        }
        return {finding.name: finding for finding in preflight(teacher, **(settings | options))}

    return run


def refused(check, teacher, **options):
    with pytest.raises(PreflightFailed) as error:
        check(teacher, **options)
    assert isinstance(error.value, TeacherMismatch)
    stopping = [finding for finding in error.value.findings if finding.stops]
    assert all(finding.fix in str(error.value) for finding in stopping)
    return {finding.name: finding for finding in stopping}, str(error.value)


@pytest.mark.parametrize("want", [Want(), Want(top_k=4), Want(distribution=True)], ids=["one", "top", "all"])
def test_a_sound_teacher_passes_and_every_check_says_what_it_saw(local, check, make_qwen, tokenizer, want):
    same = LocalTeacher(make_qwen(vocab_size=len(tokenizer)))
    findings = check(local, want=want, local_check=same, student_model=same, is_student=True, temperature=1.0)
    assert all(finding.ok for finding in findings.values())
    assert "<|user|>what is two plus two" in findings["prompts"].detail
    assert findings["against a local model"].detail.startswith("the same to")
    assert str(findings["temperature"]) == "[ok] temperature: 1.0 for both"
    assert len(findings) == 18


def test_candidates_of_the_student_pass_too(local, check, rows):
    candidates_BTK = torch.randint(0, 298, (2, max(len(row.completion_ids) for row in rows), 3))
    assert check(local, want=Want(candidates_BTK=candidates_BTK))["support"].ok


def test_a_tokenizer_that_maps_a_text_to_other_ids_is_refused(local, check, tokenizer):
    # pitfall 19: the same letters, other ids; sizes and class are equal
    a, b = tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b")
    spec = tokenizer.backend_tokenizer.to_str().replace(f'"a":{a},"b":{b},', f'"a":{b},"b":{a},')
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec), eos_token="<|end|>")
    assert len(other) == len(tokenizer)
    failed, message = refused(check, local, teacher_tokenizer=other)
    assert f"token 'a' is id {a} for the student and id {b} for the teacher" in failed["tokenizer"].detail
    assert "align across tokenizers" in message
    assert check(local, teacher_tokenizer=other, is_aligned=True)["tokenizer"].ok


def test_no_id_of_the_student_comes_into_the_prompt_of_a_teacher_with_another_tokenizer(local, check, rows):
    asked = []

    def note(scores, those):
        asked.extend(row.prompt_ids for row in those)
        return scores

    assert check(Bent(local, note), is_aligned=True)["prompt boundary"].ok
    assert set(asked) == {row.prompt_ids for row in rows}
    asked.clear()
    check(Bent(local, note))
    assert set(asked) > {row.prompt_ids for row in rows}


def test_equal_vocabularies_that_split_otherwise_are_refused(local, check, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert other.get_vocab() == tokenizer.get_vocab()
    failed, _ = refused(check, local, teacher_tokenizer=other)
    assert "the vocabularies are equal, but" in failed["tokenizer"].detail


def test_another_template_or_eos_is_a_warning_unless_declared(local, check, tokenizer):
    # pitfall 21
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template + " "
    other.eos_token = "<|assistant|>"
    findings = check(local, teacher_tokenizer=other)
    assert not findings["chat template"].ok
    assert not findings["chat template"].stops
    assert "declare that it has its own" in str(findings["chat template"])
    assert str(findings["special tokens"]).startswith(
        "[warning] special tokens: for student and teacher eos_token_id is"
    )
    assert check(local, teacher_tokenizer=other, template_declared=True)["chat template"].ok
    assert check(local, teacher_tokenizer=None)["tokenizer"].detail.startswith("the teacher's is not known here")


def test_a_teacher_narrower_than_the_tokenizer_is_refused_and_a_padded_one_is_not(local, check, make_qwen):
    # pitfall 18: padding of the vocabulary must not stop sampled-token scores
    failed, message = refused(check, LocalTeacher(make_qwen(vocab_size=250)), want=Want())
    assert "the student's tokenizer has 298 ids, and the teacher knows 250" in failed["vocabulary width"].detail
    padded = LocalTeacher(make_qwen(vocab_size=310))
    assert "310 ids, 12 of them padding" in check(padded)["vocabulary width"].detail
    student = LiveTeacher(make_qwen(vocab_size=298))
    failed, message = refused(check, padded, want=Want(distribution=True), student_model=student)
    assert "over 298 ids and the teacher's over 310" in failed["vocabulary width"].detail
    assert "vocab_size=298" in message
    cut = LocalTeacher(make_qwen(vocab_size=310), vocab_size=298)
    assert check(cut, want=Want(distribution=True), student_model=student)["vocabulary width"].ok


def test_bos_twice_is_refused(local, check, rows):
    # pitfall 22
    failed, _ = refused(check, local, sample_rows=[replace(rows[0], prompt_ids=(0, 0, 5))])
    assert "begins with BOS (id 0) twice (1 of 1 rows)" in failed["BOS"].detail


@pytest.mark.parametrize(("needs", "ok"), [(0, True), (1, False)])
def test_a_server_needs_one_token_more_than_the_sequence(local, check, needs, ok):
    # pitfall 26: 2048 ids in a context of 2048
    served = Bent(local, max_model_len=2048, needs_extra_tokens=needs)
    if ok:
        assert check(served, max_length=2048)["context length"].detail == "2048 of 2048"
        return
    failed, message = refused(check, served, max_length=2048)
    assert "need a context of 2049, and the teacher has 2048" in failed["context length"].detail
    assert "--max-model-len 2049" in message


def test_servers_speak_for_themselves(local, check):
    facts = [SimpleNamespace(max_model_len=limit, model="qwen") for limit in (4096, 2048)]
    served = Bent(local, facts=lambda: facts)
    assert check(served, max_length=2047)["context length"].detail == "2048 of 2048"
    failed, _ = refused(check, served, expected_model="llama")
    assert "the teacher has ['qwen'], and 'llama' was asked for" in failed["model name"].detail

    def nobody():
        raise TeacherUnavailable("no replica answers")

    failed, _ = refused(check, Bent(local, facts=nobody))
    assert "no replica answers" in failed["context length"].detail


def test_max_logprobs_below_k_is_refused_before_anything_is_scored(local, check):
    # pitfall 24: a server's limit of 20, and k = 64
    failed, message = refused(check, Bent(local, max_logprobs=20), want=Want(top_k=64))
    assert "the top 64, and the teacher gives 20 at most" in failed["max_logprobs"].detail
    assert "--max-logprobs 64" in message
    assert check(Bent(local, max_logprobs=-1), want=Want(top_k=64))["max_logprobs"].ok


def test_another_temperature_is_refused(local, check, make_qwen):
    # pitfall 6
    failed, _ = refused(check, local, temperature=0.5)
    assert "trained at 0.5, and the teacher's log-probs hold at 1.0" in failed["temperature"].detail
    warm = LocalTeacher(make_qwen(vocab_size=298), temperature=0.5)
    assert check(warm, temperature=0.5)["temperature"].ok

    def says_half(scores, rows):
        return replace(scores, temperature=0.5)  # and scores at 1, as vLLM does

    failed, _ = refused(check, Bent(local, says_half), temperature=0.5, local_check=warm)
    assert "another temperature" in failed["against a local model"].fix


def late(scores, rows):
    """The first score is 0 and the last is lost: scores at token positions, taken for the next."""
    shifted = torch.roll(scores.logprob_BT, 1, dims=1).masked_fill(~scores.valid_BT, 0.0)
    shifted[:, 0] = 0.0
    return replace(scores, logprob_BT=shifted)


def early(scores, rows):
    shifted = torch.roll(scores.logprob_BT, -1, dims=1)
    shifted[:, -1] = 0.0
    return replace(scores, logprob_BT=shifted.masked_fill(~scores.valid_BT, 0.0))


@pytest.mark.parametrize("bend", [late, early])
def test_scores_one_position_off_are_found_without_a_local_model(local, check, bend):
    # pitfall 1
    failed, message = refused(check, Bent(local, bend))
    assert {"one-token answers", "prompt boundary"} & set(failed)
    assert "the scores stand one position off" in message


@pytest.mark.parametrize(("bend", "what"), [(late, "late"), (early, "early")])
def test_a_local_model_says_which_way_they_are_off(local, check, bend, what):
    failed, _ = refused(check, Bent(local, bend), local_check=local)
    assert failed["against a local model"].detail.endswith(f"one position {what}")


def test_a_local_model_of_other_weights_is_told_from_a_shift(local, check, make_qwen):
    failed, _ = refused(check, local, local_check=LocalTeacher(make_qwen(seed=1, vocab_size=298)))
    assert "compare model name, revision and dtype" in failed["against a local model"].fix


def test_a_prefix_cache_that_answers_for_other_tokens_is_found(local, check):
    # pitfall 23: the second time another value; in another order the rows of the first
    calls = []

    def forgetful(scores, rows):
        calls.append(1)
        return replace(scores, logprob_BT=scores.logprob_BT - 0.1 * len(calls))

    failed, message = refused(check, Bent(local, forgetful))
    assert "differ by 0.1000 nats when asked again and by 0.2000 in another order" in failed["same answer twice"].detail
    assert "prefix caching" in message

    def unordered(scores, rows):
        first = rows[0].prompt_ids[0]
        return (
            scores
            if first == min(row.prompt_ids[0] for row in rows)
            else replace(scores, logprob_BT=scores.logprob_BT.flip(0), valid_BT=scores.valid_BT.flip(0))
        )

    failed, _ = refused(check, Bent(local, unordered))
    assert "same answer twice" in failed


def test_too_few_scores_and_failed_rows_are_named(local, check):
    short = LocalTeacher(local.model, max_length=8)
    failed, _ = refused(check, Bent(short))
    assert "rows were not scored; row 0:" in failed["scores"].detail

    def empty(scores, rows):
        return replace(scores, valid_BT=torch.zeros_like(scores.valid_BT))

    failed, _ = refused(check, Bent(local, empty))
    assert "row 0 has" in failed["scores"].detail
    assert "completion ids and 0 scores" in failed["scores"].detail


@pytest.mark.parametrize(
    ("value", "name", "told"),
    [(float("nan"), "log-probs", "one is nan"), (0.5, "log-probs", "one is 0.5000"), (0.0, "log-probs", "row 0 is 0")],
)
def test_numbers_that_are_no_log_probs_are_refused(local, check, value, name, told):
    # pitfall 28: zeros are a failed call in disguise
    def spoiled(scores, rows):
        return replace(scores, logprob_BT=scores.logprob_BT.index_fill(0, torch.tensor([0]), value))

    failed, _ = refused(check, Bent(local, spoiled))
    assert told in failed[name].detail


def test_a_sentinel_for_minus_infinity_is_a_warning(local, check, rows):
    # pitfall 25: -9999 comes in the place of -inf
    def floored(scores, asked):
        hit = torch.tensor([[token == 71 for token in row.completion_ids] + [False] * 9 for row in asked])
        return replace(scores, logprob_BT=scores.logprob_BT.masked_fill(hit[:, : scores.logprob_BT.shape[1]], -9999.0))

    padded = [replace(row, completion_ids=row.completion_ids[:3]) for row in rows]
    finding = check(Bent(local, floored), sample_rows=padded)["log-probs"]
    assert not finding.ok
    assert "1 of 6 are below -1000" in finding.detail
    assert "bound the gap" in finding.fix


def test_a_support_that_is_no_distribution_is_refused(local, check):
    def halved(scores, rows):
        return replace(scores, top_logprob_BTK=scores.top_logprob_BTK / 8)

    failed, _ = refused(check, Bent(local, halved), want=Want(top_k=8))
    assert "add up to" in failed["support"].detail

    def turned(scores, rows):
        return replace(scores, top_logprob_BTK=scores.top_logprob_BTK.flip(-1))

    failed, _ = refused(check, Bent(local, turned), want=Want(top_k=8))
    assert "not in falling order" in failed["support"].detail

    def dropped(scores, rows):
        return replace(scores, top_logprob_BTK=None, top_ids_BTK=None)

    failed, _ = refused(check, Bent(local, dropped), want=Want(top_k=8))
    assert "8 ids for each token were asked for, and none came" in failed["support"].detail


def test_teacher_and_student_of_the_same_weights_have_no_gap(local, check, make_qwen):
    model = make_qwen(vocab_size=298)
    assert check(local, student_model=LiveTeacher(model), is_student=True)["gap to the student"].ok
    other = LiveTeacher(make_qwen(seed=1, vocab_size=298))
    assert check(local, student_model=other)["gap to the student"].ok
    failed, _ = refused(check, local, student_model=other, is_student=True)
    assert "the same weights and prompt, and one token differs by" in failed["gap to the student"].detail


def test_a_gap_that_is_identically_zero_is_a_warning(check, make_qwen):
    # pitfall 5
    student = LiveTeacher(make_qwen(vocab_size=298))
    finding = check(student, student_model=student)["gap to the student"]
    assert not finding.ok
    assert "identically zero" in finding.detail


def test_both_sides_prompts_are_shown_and_completions_must_be_the_same(local, check, rows, tokenizer):
    # pitfalls 20 and 21
    block = fill("a hint: {hint}\n\n", {"hint": "add"})
    teacher_prompt = privileged_prompt(
        CHAT, block, tokenizer, student_ids=rows[0].prompt_ids, completion_tokens=5, max_length=None
    )
    seen = [replace(rows[0], prompt_ids=teacher_prompt.ids)]
    detail = check(local, sample_rows=seen, student_rows=rows[:1])["prompts"].detail
    assert f"student ({len(rows[0].prompt_ids)} ids) '<|user|>what" in detail
    assert f"teacher ({len(teacher_prompt.ids)} ids) '<|user|>a hint: add" in detail
    failed, _ = refused(check, local, sample_rows=seen, student_rows=[replace(seen[0], completion_ids=(5, 6))])
    assert "nothing may be tokenised again" in failed["prompts"].fix
    failed, _ = refused(check, local, sample_rows=seen, student_rows=rows)
    assert "1 rows for the teacher, 2 for the student" in failed["prompts"].detail


def test_a_cache_and_a_recording_pass_through_the_same_checks(local, check, rows, tmp_path):
    cached = CachedTeacher(local, tmp_path)
    assert "200 of 256" in check(cached)["context length"].detail
    findings = check(RecordedTeacher(tmp_path))
    assert all(finding.ok for finding in findings.values())
    assert "whole rollouts only" in findings["one-token answers"].detail
    failed, _ = refused(check, RecordedTeacher(tmp_path), want=Want(top_k=2))
    assert "asking the teacher ended in: row 0" in failed["scores"].detail


def test_rows_too_short_to_tell_anything_are_refused(local, check, rows):
    for bad in ([], [replace(rows[0], completion_ids=(5,))]):
        with pytest.raises(ValueError, match="at least 1 row, each with a completion of at least 2 ids"):
            check(local, sample_rows=bad)
