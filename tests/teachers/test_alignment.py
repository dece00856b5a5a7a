"""A teacher with another tokenizer: bytes, spans, what is handed back, and what is masked.

Two small tokenizers learn different pieces of the same texts: byte-level BPE, as SmolLM2 and Qwen have it, and BPE with
spaces as "▁" and byte fallback, as Gemma has it. `benchmarks/across_tokenizers.py` shows it with the real ones.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from teachers.alignment import AlignedTeacher, TokenBytes, align, common_spans, spread_gap_evenly
from teachers.errors import TeacherCannot, TeacherMismatch
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from tests.tiny_models import tokenizer as word_level

CORPUS = ["the teacher spells the word", "there is another word: 12 + 30 = 42", "naïve café, 漢字 🙂"] * 4


def byte_level(size=330):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "<end>", "<tool>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<end>", extra_special_tokens=["<tool>"]
    )


def byte_fallback(extra_normalizer=None):
    letters = [*dict.fromkeys("▁" + "".join(CORPUS).replace(" ", "▁").replace("漢", "").replace("🙂", ""))]
    pieces = ["<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [
        ("t", "h"),
        ("▁", "th"),
        ("▁th", "e"),
        ("w", "o"),
        ("r", "d"),
        ("e", "r"),
        ("l", "l"),
        ("s", "p"),
        ("1", "2"),
    ]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([extra_normalizer, spaces]) if extra_normalizer else spaces
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_bos_token = True
    return tokenizer


STUDENT, TEACHER = byte_level(), byte_fallback()
STUDENT_BYTES, TEACHER_BYTES = TokenBytes(STUDENT), TokenBytes(TEACHER)
END, TOOL = 1, 2
EOS, BOS = 0, 1
TEXTS = st.text(st.sampled_from("the word sp12+ \né漢🙂x"), max_size=25)


def ids_of(text):
    return STUDENT.encode(text, add_special_tokens=False)


def row(text, *more, prompt="the word"):
    return Row(prompt_ids=tuple(ids_of(prompt)), completion_ids=(*ids_of(text), *more))


@pytest.fixture
def inner(make_qwen):
    return LocalTeacher(make_qwen(vocab_size=len(TEACHER)), name="gemma")


@pytest.fixture
def teacher(inner):
    return AlignedTeacher(inner, STUDENT, TEACHER, prompt_of=lambda row: (BOS, 5))


def laid(ids):
    alignment = align(ids, STUDENT_BYTES, TEACHER_BYTES, {END: EOS})
    assert alignment is not None
    return alignment


def spelt(tokens, text):
    spelling = tokens.spell(text)
    assert spelling is not None
    return spelling


def spans_of(scores):
    assert scores.span_ids_BT is not None
    return scores.span_ids_BT


def own_total(inner, text, *more):
    """What the teacher thinks of a text in its own tokens, asked directly."""
    ids = (*TEACHER.encode(text, add_special_tokens=False), *more)
    return float(inner.score([Row(prompt_ids=(BOS, 5), completion_ids=ids)]).logprob_BT.sum())


@given(TEXTS)
def test_tokens_spell_their_text(text):
    for tokens in (STUDENT_BYTES, TEACHER_BYTES):
        ids, pieces = spelt(tokens, text)
        assert b"".join(pieces) == text.encode()
        assert ids == tokens.tokenizer.encode(text, add_special_tokens=False)


def test_an_added_token_of_a_byte_level_tokenizer_stands_for_itself():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think é>"])
    assert TokenBytes(tokenizer).of(tokenizer.encode("<think é>", add_special_tokens=False)) == ["<think é>".encode()]


def test_a_space_that_the_teacher_puts_before_a_text_belongs_to_its_first_token():
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    assert spelt(TokenBytes(tokenizer), "the word")[1] == [b"the", b" ", b"wo", b"rd"]


def test_a_text_that_a_tokenizer_cannot_spell_is_not_guessed():
    assert TEACHER_BYTES.spell("a▁b") is None  # it would come back as "a b"


def test_tokenizers_that_do_not_spell_are_refused():
    with pytest.raises(TeacherCannot, match="byte by byte"):
        TokenBytes(word_level())


def test_spans_end_where_both_tokens_end():
    # |he|llo| w|orld|  and  |hell|o| wor|ld|  have the ends 5 and 11 in common
    spans = common_spans([2, 3, 2, 4], [4, 1, 4, 2])
    assert [one.tolist() for one in spans] == [[0, 0, 1, 1], [0, 0, 1, 1]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.lists(st.integers(0, 20), max_size=8))
def test_spans_against_loops(lengths, cuts):
    total = sum(lengths)
    ends = sorted({cut for cut in cuts if 0 < cut < total} | {total})
    other = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def slow(own, others):
        own_ends, other_ends = np.cumsum(own).tolist(), np.cumsum(others).tolist()
        span, spans = 0, []
        for end in own_ends:
            spans.append(span)
            if end in other_ends:
                span += 1
        return spans

    spans = common_spans(lengths, other)
    assert [one.tolist() for one in spans] == [slow(lengths, other), slow(other, lengths)]


def test_a_span_is_shared_by_bytes():
    # the student's |the|s|pel|l| against the teacher's |th|e|sp|e|ll|: two spans, |the| and |spell|
    ids = [STUDENT.get_vocab()[token] for token in ("the", "s", "pel", "l")]
    alignment = laid(ids)
    assert TEACHER_BYTES.of(alignment.teacher_ids) == [b"th", b"e", b"sp", b"e", b"ll"]
    assert alignment.span_T.tolist() == [0, 1, 1, 1]
    assert alignment.teacher_span_U.tolist() == [0, 0, 1, 1, 1]
    assert alignment.share_T.tolist() == [1.0, 0.2, 0.6, 0.2]


@given(TEXTS)
def test_every_byte_of_a_text_is_aligned(text):
    alignment = laid(ids_of(text))
    assert (alignment.span_T >= 0).all()
    spans = alignment.teacher_span_U.tolist()
    assert sorted({*spans}) == [*range(len({*spans}))] == sorted({*alignment.span_T.tolist()})
    assert np.bincount(alignment.span_T, weights=alignment.share_T).tolist() == pytest.approx([1.0] * len({*spans}))
    assert alignment.teacher_ids == tuple(TEACHER.encode(text, add_special_tokens=False))


@given(st.lists(st.integers(0, len(STUDENT) - 1), max_size=12))
def test_whatever_a_student_samples_has_a_right_alignment(ids):
    alignment = laid(ids)
    # what the teacher is asked is the text up to the first bytes that are none, with the end of sequence where it stood
    raw = [
        piece if i > TOOL else (b"\xfe" if i == END else b"")
        for i, piece in zip(ids, STUDENT_BYTES.of(ids), strict=True)
    ]
    stretches = b"".join(raw).split(b"\xfe")
    asked = []
    for n, stretch in enumerate(stretches):
        text = stretch.decode(errors="surrogateescape")
        whole = not any("\udc80" <= char <= "\udcff" for char in text)
        asked.append(text if whole else text[: next(k for k, char in enumerate(text) if "\udc80" <= char <= "\udcff")])
        if not whole:
            break
        asked += ["<eos>"] * (n + 1 < len(stretches))
    assert TEACHER.decode([*alignment.teacher_ids]) == "".join(asked)
    kept = alignment.span_T >= 0
    assert (alignment.share_T[~kept] == 0).all()
    spans, shares = (
        np.unique(alignment.span_T[kept]),
        np.bincount(alignment.span_T[kept], weights=alignment.share_T[kept]),
    )
    assert shares[spans].tolist() == pytest.approx([1.0] * len(spans))
    assert {*spans.tolist()} <= {*alignment.teacher_span_U.tolist()}


def test_sums_are_the_teachers_own(teacher, inner):
    texts = ["the teacher spells the word", " 12 + 30 = 42", "naïve 漢字 🙂"]
    rows = [row(text, END) for text in texts]
    assert isinstance(teacher, Teacher)
    scores = teacher.score(rows)
    assert scores.valid_BT.sum(1).tolist() == [len(row.completion_ids) for row in rows]
    for i, text in enumerate(texts):
        assert float(scores.logprob_BT[i].sum()) == pytest.approx(own_total(inner, text, EOS), abs=1e-3)
    assert scores.stats["unaligned_tokens"] == 0
    assert scores.stats["teacher_tokens"] == sum(len(TEACHER.encode(t, add_special_tokens=False)) + 1 for t in texts)


def test_the_same_tokenizer_on_both_sides_changes_nothing(make_qwen):
    inner = LocalTeacher(make_qwen(vocab_size=len(STUDENT)))
    rows = [row("the teacher spells", END), row(" 12 + 30 = 42")]
    aligned = AlignedTeacher(inner, STUDENT, STUDENT, prompt_of=lambda row: row.prompt_ids).score(rows)
    plain = inner.score(rows)
    torch.testing.assert_close(aligned.logprob_BT, plain.logprob_BT)
    assert aligned.valid_BT.equal(plain.valid_BT)
    assert spans_of(aligned)[0, :3].tolist() == [0, 1, 2]


def test_special_tokens_without_a_counterpart_are_masked_and_counted(teacher, inner):
    scores = teacher.score([row("the", TOOL, *ids_of(" word"), END)])
    before, after = len(ids_of("the")), len(ids_of(" word"))
    assert scores.valid_BT[0].tolist() == [True] * before + [False] + [True] * (after + 1)
    assert scores.logprob_BT[0, before] == 0
    assert scores.stats["unaligned_tokens"] == 1
    assert spans_of(scores)[0, before] == -1


def test_roles_say_what_a_special_token_is_for_the_teacher(inner):
    teacher = AlignedTeacher(inner, STUDENT, TEACHER, prompt_of=lambda row: (BOS, 5), roles={TOOL: EOS})
    scores = teacher.score([row("the", TOOL, END)])
    assert scores.valid_BT[0].tolist() == [True] * (len(ids_of("the")) + 1) + [False]
    assert float(scores.logprob_BT.sum()) == pytest.approx(own_total(inner, "the", EOS), abs=1e-4)


def test_a_character_that_is_cut_in_half_is_masked_and_so_is_what_follows(teacher, inner):
    whole = ids_of("the 漢")
    pieces = STUDENT_BYTES.of(whole)
    end = next(i for i in range(len(pieces)) if b"".join(pieces[: i + 1]).decode(errors="ignore") == "the " and i >= 2)
    half = Row(prompt_ids=(3,), completion_ids=(*whole[: end + 1], whole[0]))
    assert b"".join(STUDENT_BYTES.of(half.completion_ids)).decode(errors="replace") != "the the"
    scores = teacher.score([half, row("the ")])
    kept = int(scores.valid_BT[0].sum())
    assert 0 < kept < len(half.completion_ids)
    assert scores.valid_BT[0, :kept].all()
    torch.testing.assert_close(scores.logprob_BT[0, :kept], scores.logprob_BT[1, :kept])
    assert not scores.failures


def test_a_text_that_the_teacher_rewrites_fails_its_row_alone(inner):
    rewriting = byte_fallback(normalizers.NFKC())
    teacher = AlignedTeacher(inner, STUDENT, rewriting, prompt_of=lambda row: (BOS, 5))
    scores = teacher.score([row("the word"), row("ﬁ")])
    assert scores.valid_BT.any(1).tolist() == [True, False]
    assert "rewrites the text" in scores.failures[1]
    assert scores.stats["failed_rows"] == 1
    with pytest.raises(TeacherMismatch, match="every row"):
        teacher.score([row("ﬁ")])


def test_a_row_that_the_teacher_cannot_score_stays_failed(make_qwen):
    inner = LocalTeacher(make_qwen(vocab_size=len(TEACHER)), max_length=8)
    teacher = AlignedTeacher(inner, STUDENT, TEACHER, prompt_of=lambda row: (BOS,))
    scores = teacher.score([row("the"), row("the teacher spells the word")])
    assert list(scores.failures) == [1]
    assert not scores.valid_BT[1].any()
    assert (spans_of(scores)[1] == -1).all()


def test_a_plain_prompt_is_told_in_the_teachers_tokens(inner):
    plain = AlignedTeacher(inner, STUDENT, TEACHER)
    prompt = TEACHER.encode("the word: 12", add_special_tokens=True)
    told = AlignedTeacher(inner, STUDENT, TEACHER, prompt_of=lambda row: prompt)
    rows = [row("the teacher", prompt="the word: 12")]
    torch.testing.assert_close(plain.score(rows).logprob_BT, told.score(rows).logprob_BT)
    with pytest.raises(TeacherMismatch, match="row 0 has an empty prompt"):
        AlignedTeacher(inner, STUDENT, TEACHER, prompt_of=lambda row: ()).score(rows)


def test_more_than_sampled_tokens_is_refused(teacher, make_qwen):
    for want in (Want(top_k=2), Want(distribution=True), Want(candidates_BTK=torch.zeros(1, 1, 1, dtype=torch.long))):
        with pytest.raises(TeacherCannot, match="another tokenizer"):
            teacher.score([row("the")], want)
    warm = LocalTeacher(make_qwen(vocab_size=len(TEACHER)), temperature=0.5)
    with pytest.raises(TeacherCannot, match=r"temperature 0\.5"):
        AlignedTeacher(warm, STUDENT, TEACHER, prompt_of=lambda row: (BOS,)).score([row("the")])


def test_a_gap_can_be_spread_evenly(teacher):
    rows = [row("the teacher spells", TOOL, END), row(" 12 +")]
    scores = teacher.score(rows)
    student_BT = -torch.rand(scores.logprob_BT.shape, generator=torch.Generator().manual_seed(0))
    even_BT = spread_gap_evenly(scores, student_BT)
    assert (even_BT[~scores.valid_BT] == 0).all()
    for i in range(len(rows)):
        for span in spans_of(scores)[i].unique().tolist():
            if span >= 0:
                own = spans_of(scores)[i] == span
                assert even_BT[i, own].sum().item() == pytest.approx(scores.logprob_BT[i, own].sum().item(), abs=1e-4)
                gap = (even_BT - student_BT)[i, own]
                torch.testing.assert_close(gap, gap.mean().expand_as(gap), rtol=1e-4, atol=1e-5)


def test_no_rows_and_empty_completions(teacher):
    assert teacher.score([]).logprob_BT.shape == (0, 0)
    assert teacher.score([Row(prompt_ids=(3,), completion_ids=())]).logprob_BT.shape == (1, 0)
