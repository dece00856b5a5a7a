"""A teacher with another tokenizer: both sides' tokens are laid over the bytes of the same text.

The student's completion is turned into text, the teacher tokenises that text itself, and the text is cut wherever a
student token and a teacher token end together. Such a smallest common piece is a span. A span's log-prob under the
teacher is the sum over its teacher tokens. It is given back to the student's tokens of the span by their share of its
bytes:

    logprob[t] = bytes[t] / bytes[span] * sum_{u in span} log p_teacher(u)

so the sum over a span, and with it every sequence sum, is the teacher's own; `span_ids_BT` allows another rule, such as
`spread_gap_evenly`. The spelling matters: log p(span) is that of the teacher's own tokens for the text, not of all ways
to spell it.

What cannot be aligned is masked and counted: special tokens without a counterpart, a character that the end of the
completion cuts in half and all behind it, and rows whose text the teacher's tokenizer rewrites (Unicode normalisation).

Shape letters: T student tokens, U teacher tokens, B rows.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from teachers.errors import TeacherCannot, TeacherMismatch
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.scores import TeacherScores

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REWRITES = (
    "the tokenizer of teacher {name!r} rewrites the text (by Unicode normalisation, say), so its tokens cannot be laid "
    "over the student's"
)
_ANOTHER = "Use a teacher whose tokenizer keeps the text as it is"
_SAMPLE = 'Two words, 3.5% of "ünïcödé", 漢字 and 🙂:\n\n\tif x_1 <= 20:  return [x_1]'


class TokenBytes:
    """What a tokenizer's tokens stand for, in bytes."""

    def __init__(self, tokenizer: Any):
        """Reads the tokenizer's decoder and tries it on a text.

        Args:
          tokenizer: a fast tokenizer of transformers, byte-level BPE or SentencePiece with byte fallback.

        Raises:
          TeacherCannot: its tokens do not spell the text, as with WordPiece or a lossy normaliser.
        """
        self.tokenizer = tokenizer
        self.special = {*tokenizer.all_special_ids}
        self.special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        kinds = _kinds(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        self._is_byte_level = "ByteLevel" in kinds
        self._bytes: dict[int, bytes] = {}
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        if not (self._is_byte_level or kinds & {"Metaspace", "ByteFallback"}) or self.spell(_SAMPLE) is None:
            raise TeacherCannot(
                f"the tokens of tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} do not spell out a "
                "text byte by byte, so they cannot be aligned with another tokenizer's; use a teacher of the "
                "same tokenizer"
            )

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id; a special token's are its name's."""
        unknown = [i for i in {*ids} if i not in self._bytes]
        for i, token in zip(unknown, self.tokenizer.convert_ids_to_tokens(unknown), strict=True):
            self._bytes[i] = b"" if token is None else self._decoded(token)
        return [self._bytes[i] for i in ids]

    def _decoded(self, token: str) -> bytes:
        if self._is_byte_level:
            if all(char in self._byte_of for char in token):
                return bytes(self._byte_of[char] for char in token)
            return token.encode()  # an added token, which stands for itself
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def spell(self, text: str) -> tuple[list[int], list[bytes]] | None:
        """This tokenizer's own ids for a text, and their bytes; None where they spell another text.

        A space that the tokenizer sets before a text belongs to its first token, which stands for the rest of it.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        pieces, wanted = self.of(ids), text.encode()
        spelt = b"".join(pieces)
        if spelt == b" " + wanted and pieces[0].startswith(b" "):
            pieces = [pieces[0][1:], *pieces[1:]]
        elif spelt != wanted:
            return None
        return ids, pieces


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How one completion lies over the teacher's tokens for it.

    Attributes:
      teacher_ids: the teacher's own ids of the text.
      teacher_span_U: the span of each of them.
      span_T: the span of each student token; -1 where it has none.
      share_T: the part of its span's log-prob that a student token gets; 0 where it has none.
    """

    teacher_ids: tuple[int, ...]
    teacher_span_U: Int64[np.ndarray, " U"]
    span_T: Int64[np.ndarray, " T"]
    share_T: Float64[np.ndarray, " T"]


def common_spans(
    length_T: Sequence[int] | Int64[np.ndarray, " T"], length_U: Sequence[int] | Int64[np.ndarray, " U"]
) -> tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " U"]]:
    """Cuts a text wherever both tokenisations of it have a boundary.

    Args:
      length_T: bytes of the student's tokens, which sum to the text's.
      length_U: bytes of the teacher's tokens, which sum to the same.

    Returns:
      The span of each student token and of each teacher token, counted from 0.
    """
    end_T, end_U = np.cumsum(length_T), np.cumsum(length_U)
    common = np.intersect1d(end_T, end_U)
    return np.searchsorted(common, end_T), np.searchsorted(common, end_U)


def align(ids: Sequence[int], student: TokenBytes, teacher: TokenBytes, roles: Mapping[int, int]) -> Alignment | None:
    """Lays a completion over the teacher's tokens for the same text.

    Args:
      ids: the student's.
      student: the bytes of the student's tokens.
      teacher: the bytes of the teacher's.
      roles: the teacher's id for a special token of the student, e.g. its end of sequence.

    Returns:
      The alignment, or None where the teacher's tokenizer rewrites the text.
    """
    teacher_ids: list[int] = []
    teacher_span: list[int] = []
    span_T, share_T = np.full(len(ids), -1), np.zeros(len(ids))
    for start, end in _runs(ids, student.special):
        num_spans = max(teacher_span, default=-1) + 1
        if ids[start] not in student.special:
            pieces = student.of(ids[start:end])
            text, is_whole = _valid_text(b"".join(pieces))
            spelt = teacher.spell(text)
            if spelt is None:
                return None
            own_span, span, share = _text_spans(pieces, text, spelt[1])
            teacher_ids += spelt[0]
            teacher_span += (own_span + num_spans).tolist()
            span_T[start:end], share_T[start:end] = np.where(span < 0, -1, span + num_spans), share
            if not is_whole:
                break  # the teacher has not seen the same text from here on
        elif ids[start] in roles:
            teacher_ids.append(roles[ids[start]])
            teacher_span.append(num_spans)
            span_T[start], share_T[start] = num_spans, 1.0
    return Alignment(
        teacher_ids=tuple(teacher_ids),
        teacher_span_U=np.array(teacher_span, dtype=np.int64),
        span_T=span_T,
        share_T=share_T,
    )


def _text_spans(
    pieces: Sequence[bytes], text: str, own_pieces: Sequence[bytes]
) -> tuple[Int64[np.ndarray, " U"], Int64[np.ndarray, " T"], Float64[np.ndarray, " T"]]:
    """Spans of the teacher's and the student's tokens of one stretch of text, and the student tokens' shares."""
    # where the text ends in the middle of a token, a piece of its own stands for that token's beginning
    end_T = np.minimum(np.cumsum([len(piece) for piece in pieces]), len(text.encode()))
    length_T = np.diff(end_T, prepend=0)
    span_T, own_span_U = common_spans(length_T, [len(piece) for piece in own_pieces])
    is_cut_T = length_T < [len(piece) for piece in pieces]
    keep_T = (length_T > 0) & ~np.isin(span_T, span_T[is_cut_T & (length_T > 0)])
    bytes_S = np.bincount(span_T, weights=length_T)
    return own_span_U, np.where(keep_T, span_T, -1), np.where(keep_T, length_T / np.maximum(bytes_S[span_T], 1), 0.0)


class AlignedTeacher:
    """Scores a student of another tokenizer with `inner`, on sampled tokens; see this module for how.

    `stats` gains "aligned_tokens", "unaligned_tokens", "spans" and "teacher_tokens".

    Attributes:
      tokenizer: the teacher's.
    """

    def __init__(
        self,
        inner: Teacher,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        *,
        prompt_of: Callable[[Row], Sequence[int]] | None = None,
        roles: Mapping[int, int] | None = None,
        name: str | None = None,
    ):
        """Reads both tokenizers; asks nobody yet.

        Args:
          inner: the teacher, local or served; it gets its own ids.
          student_tokenizer: a fast tokenizer of transformers.
          teacher_tokenizer: likewise.
          prompt_of: the teacher's prompt ids for a row, e.g. rendered with its own chat template; None takes the text
            of the student's prompt without special tokens, which is right for plain prompts alone.
          roles: the teacher's id for each special token of the student that it shall score; None pairs the ends of
            sequence. With chat models, the student's end of turn wants the teacher's.
          name: for messages and metrics; None for the inner teacher's.

        Raises:
          TeacherCannot: a tokenizer's tokens do not spell out texts.
        """
        self.name = inner.name if name is None else name
        self.inner = inner
        self.is_remote = getattr(inner, "is_remote", False)
        self.needs_extra_tokens = getattr(inner, "needs_extra_tokens", 0)
        self.tokenizer = teacher_tokenizer
        self._student, self._teacher = TokenBytes(student_tokenizer), TokenBytes(teacher_tokenizer)
        self._prompt_of = prompt_of or self._plain_prompt
        own = paired_ends(student_tokenizer, teacher_tokenizer) if roles is None else roles
        self._roles = dict(own)

    @property
    def inner_teachers(self) -> tuple[Teacher, ...]:
        """The one who is asked each time."""
        return (self.inner,)

    @property
    def is_collective(self) -> bool:
        """Whether every rank must ask together, if need be for no rows."""
        return bool(getattr(self.inner, "is_collective", False))

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores the sampled tokens; see `TeacherScores`.

        Raises:
          TeacherCannot: more than sampled tokens is wanted, or the inner teacher's temperature is not 1.
          TeacherMismatch: the teacher's prompt of a row is empty.
        """
        if want.top_k or want.candidates_BTK is not None or want.distribution:
            raise TeacherCannot(
                f"teacher {self.name!r} has another tokenizer, so its ids and distributions mean nothing to the "
                "student; use a method on sampled tokens, or a teacher of the student's tokenizer"
            )
        alignments = [align(row.completion_ids, self._student, self._teacher, self._roles) for row in rows]
        if rows and not any(alignments):
            raise TeacherMismatch(f"{_REWRITES.format(name=self.name)}; that holds for every row. {_ANOTHER}")
        scored = self.inner.score([self._question(i, rows[i], alignments[i]) for i in range(len(rows))])
        if scored.temperature != 1.0:
            raise TeacherCannot(
                f"teacher {self.name!r} scores at temperature {scored.temperature}: tempered log-probs of tokens do "
                "not add up to one of a text. Train at temperature 1 across tokenizers"
            )
        return self._handed_back(rows, alignments, scored)

    def close(self) -> None:
        """Closes the inner teacher."""
        self.inner.close()

    def _plain_prompt(self, row: Row) -> Sequence[int]:
        text = self._student.tokenizer.decode(row.prompt_ids, skip_special_tokens=True)
        return self._teacher.tokenizer.encode(text, add_special_tokens=True)

    def _question(self, index: int, row: Row, alignment: Alignment | None) -> Row:
        prompt_ids = tuple(self._prompt_of(row))
        if not prompt_ids:
            raise TeacherMismatch(
                f"row {index} has an empty prompt for teacher {self.name!r}, so nothing predicts its first token; let "
                "prompt_of begin with the teacher's BOS id"
            )
        ids = () if alignment is None else alignment.teacher_ids
        return Row(prompt_ids=prompt_ids, completion_ids=ids, images=row.images, labels=row.labels)

    def _handed_back(
        self, rows: Sequence[Row], alignments: Sequence[Alignment | None], scored: TeacherScores
    ) -> TeacherScores:
        teacher_BU = scored.logprob_BT.masked_fill(~scored.valid_BT, torch.nan).double().cpu().numpy()
        shape = (len(rows), max((len(row.completion_ids) for row in rows), default=0))
        logprob_BT, span_BT = np.full(shape, np.nan), np.full(shape, -1)
        failures = dict(scored.failures)
        num_spans = 0
        for i, alignment in enumerate(alignments):
            if alignment is None:
                failures[i] = _REWRITES.format(name=self.name)
                continue
            length, num_teacher = len(alignment.span_T), len(alignment.teacher_ids)
            sums = np.bincount(alignment.teacher_span_U, weights=teacher_BU[i, :num_teacher], minlength=1)
            row = np.where(alignment.span_T < 0, np.nan, sums[alignment.span_T] * alignment.share_T)
            logprob_BT[i, :length] = row
            span_BT[i, :length] = np.where(np.isnan(row), -1, alignment.span_T)
            num_spans += len(np.unique(span_BT[i, :length][span_BT[i, :length] >= 0]))
        valid_BT = torch.from_numpy(~np.isnan(logprob_BT))
        num_tokens, num_valid = sum(len(row.completion_ids) for row in rows), int(valid_BT.sum())
        counts = {"aligned_tokens": num_valid, "unaligned_tokens": num_tokens - num_valid, "spans": num_spans}
        counts["teacher_tokens"] = sum(len(a.teacher_ids) for a in alignments if a is not None)
        device = scored.logprob_BT.device
        return TeacherScores(
            logprob_BT=torch.from_numpy(np.nan_to_num(logprob_BT)).to(device, scored.logprob_BT.dtype),
            valid_BT=valid_BT.to(device),
            failures=failures,
            stats={**scored.stats, **counts, "failed_rows": len(failures)},
            span_ids_BT=torch.from_numpy(span_BT).to(device),
        )


def paired_ends(student: Any, teacher: Any, *, chat: bool = False) -> dict[int, int]:
    """The teacher's id for the special tokens with which a student ends a response.

    Args:
      student: a tokenizer of transformers.
      teacher: likewise.
      chat: responses are turns of a chat, so that the ends of a turn belong together, as far as both chat templates
        have one.

    Returns:
      Teacher ids by student id; of ends of sequence, and of ends of a turn, which go first where they are the same.
    """
    pairs = [(student.eos_token_id, teacher.eos_token_id)]
    if chat and student.chat_template and teacher.chat_template:
        pairs.append((end_of_turn(student), end_of_turn(teacher)))
    return {own: other for own, other in pairs if own is not None and other is not None}


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that a chat template sets right behind an answer; None where there is none."""
    answer = "yes"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = text[text.rindex(answer) + len(answer) :]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return next((i for i in ids[:1] if i in TokenBytes(tokenizer).special), None)


def spread_gap_evenly(scores: TeacherScores, student_logprob_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The teacher's log-probs by another rule: every student token of a span gets the same gap.

        logprob[t] = student[t] + (teacher[span] - student[span]) / tokens[span]

    Span sums stay the teacher's; only their division among tokens differs.

    Args:
      scores: of an `AlignedTeacher`.
      student_logprob_BT: the student's log-probs of the same tokens, in nats.

    Returns:
      Log-probs in nats; 0 where the token is not valid. A single one may be above 0.
    """
    if scores.span_ids_BT is None:
        raise ValueError("these scores have no spans; they do not come from a teacher with another tokenizer")
    span_BT = scores.span_ids_BT.clamp(min=0)
    gap_BT = torch.where(scores.valid_BT, scores.logprob_BT - student_logprob_BT, 0.0)
    gap_BS = torch.zeros_like(gap_BT).scatter_add(1, span_BT, gap_BT)
    count_BS = torch.zeros_like(gap_BT).scatter_add(1, span_BT, scores.valid_BT.to(gap_BT.dtype))
    even_BT = (gap_BS / count_BS.clamp(min=1)).gather(1, span_BT)
    return torch.where(scores.valid_BT, student_logprob_BT + even_BT, 0.0)


def _kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _runs(ids: Sequence[int], special: set[int]) -> list[tuple[int, int]]:
    """Start and end of each special token and of each stretch between them."""
    runs: list[tuple[int, int]] = []
    for i, token in enumerate(ids):
        if runs and token not in special and ids[i - 1] not in special:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def _valid_text(raw: bytes) -> tuple[str, bool]:
    """The text up to the first byte that is no UTF-8, and whether that is all of it."""
    try:
        return raw.decode(), True
    except UnicodeDecodeError as error:
        return raw[: error.start].decode(), False
