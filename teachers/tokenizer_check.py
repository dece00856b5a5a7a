"""Whether two tokenizers are one, by what they contain and by what they do; names and class say nothing."""

import hashlib
import json
from typing import Any

from teachers.findings import Finding, failed, passed, warned

PROBES = (
    "Let x = 12345.678; then x + 1 = ?\n\n  def f(a):\n\treturn a  # \\boxed{7}",
    "Ünïcödé 漢字 🙂 don't   DON'T",
)
"""Texts on which a difference of splitting or normalising shows: digits, white space, code, scripts, contractions."""


def tokenizer_findings(
    student: Any, teacher: Any, *, template_declared: bool = False, is_aligned: bool = False
) -> list[Finding]:
    """Compares the student's and the teacher's tokenizer.

    Args:
      student: of transformers.
      teacher: of transformers; None where the teacher's is not known here.
      template_declared: the teacher is meant to have a chat template of its own.
      is_aligned: the teacher is asked across tokenizers, so vocabularies may differ.

    Returns:
      Findings `tokenizer`, `special tokens` and `chat template`.
    """
    if teacher is None:
        return [
            passed("tokenizer", "the teacher's is not known here, so ids are taken on trust; name its model to compare")
        ]
    if is_aligned:
        same = "equal" if student.get_vocab() == teacher.get_vocab() else "different"
        return [passed("tokenizer", f"vocabularies are {same}; the teacher is aligned across tokenizers")]
    return [
        _contents(student, teacher),
        _special_tokens(student, teacher),
        _template(student, teacher, template_declared),
    ]


def _contents(student: Any, teacher: Any) -> Finding:
    fix = (
        "use a teacher of the student's family, load the student's tokenizer for both, or align across tokenizers; ids "
        "of one mean something else to the other"
    )
    own, other = student.get_vocab(), teacher.get_vocab()
    for token in sorted(own.keys() | other.keys(), key=lambda t: (min(own.get(t, 1 << 60), other.get(t, 1 << 60)), t)):
        if own.get(token) != other.get(token):
            return failed(
                "tokenizer",
                f"token {token!r} is {_id(own.get(token))} for the student and {_id(other.get(token))} for the teacher "
                f"({len(own)} and {len(other)} tokens in all)",
                fix,
            )
    for probe in PROBES:
        first, second = (t(probe, add_special_tokens=False)["input_ids"] for t in (student, teacher))
        if first != second:
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            at = min(len(first), len(second)) if at is None else at
            return failed(
                "tokenizer",
                f"the vocabularies are equal, but {probe!r} becomes {len(first)} ids for the student and {len(second)} "
                f"for the teacher, different from id {at} on",
                fix,
            )
    return passed("tokenizer", f"{len(own)} tokens, the same for both (content {_short_hash(own)})")


def _special_tokens(student: Any, teacher: Any) -> Finding:
    different = [
        f"{name} is {getattr(student, name)} and {getattr(teacher, name)}"
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(student, name) != getattr(teacher, name)
    ]
    if different:
        return warned(
            "special tokens",
            f"for student and teacher {', '.join(different)}",
            "completions end with the student's EOS: a teacher that ends with another one finds it unlikely; give both "
            "the same, or mask the last token",
        )
    return passed(
        "special tokens",
        f"BOS, EOS and PAD are {student.bos_token_id}, {student.eos_token_id}, {student.pad_token_id} for both",
    )


def _template(student: Any, teacher: Any, is_declared: bool) -> Finding:
    own, other = (_template_text(tokenizer) for tokenizer in (student, teacher))
    told = f"student {_short_hash(own)}, teacher {_short_hash(other)}"
    if own == other:
        return passed("chat template", f"the same for both ({_short_hash(own)})")
    if is_declared:
        return passed("chat template", f"different, as declared ({told})")
    return warned(
        "chat template",
        f"different: {told}",
        "the teacher answers another prompt than the student was asked; give it the student's template, or declare "
        "that it has its own",
    )


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return json.dumps(template, sort_keys=True)


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _id(token: int | None) -> str:
    return "unknown" if token is None else f"id {token}"
