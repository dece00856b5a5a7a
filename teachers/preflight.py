"""Scores a few sequences before a run begins, and names what is wrong with a teacher.

Only the protocol is used, and what a teacher says of itself where it does: `max_model_len`, `max_logprobs`,
`model_name`, `vocab_size`, `logit_width`, `needs_extra_tokens`, `is_recording`, or `facts()` of its servers. A served
teacher, a local one and a recording pass through the same checks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from teachers.errors import TeacherError
from teachers.findings import Finding, PreflightFailed, failed, passed
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.score_check import ScoreCase, score_findings
from teachers.tokenizer_check import tokenizer_findings

TOLERANCE = 0.05
"""Nats by which two scores of one token may differ: half-precision servers differ by about a hundredth."""

SHOWN = 300
"""Characters of a prompt that are shown, from its end."""


def preflight(
    teacher: Teacher,
    *,
    student_tokenizer: Any,
    sample_rows: Sequence[Row],
    max_length: int,
    want: Want = SAMPLED,
    teacher_tokenizer: Any = None,
    student_rows: Sequence[Row] | None = None,
    local_check: Teacher | None = None,
    student_model: Teacher | None = None,
    is_student: bool = False,
    temperature: float = 1.0,
    expected_model: str | None = None,
    template_declared: bool = False,
    is_aligned: bool = False,
    tolerance: float = TOLERANCE,
) -> list[Finding]:
    """Checks that `teacher` can score this student, and does it right.

    Args:
      teacher: any teacher.
      student_tokenizer: the student's.
      sample_rows: a few rows as the teacher will see them, with completions of 2 ids at least.
      max_length: longest prompt and completion together of the run, in tokens.
      want: what the method will ask for.
      teacher_tokenizer: the teacher's; None where it is not known here.
      student_rows: the same rows as the student sees them; None where the prompts are the same.
      local_check: a teacher of this process with the same weights, at the same temperature.
      student_model: the student as a teacher (`teachers.selves.LiveTeacher`), to look at the gap.
      is_student: the teacher has the student's weights and prompt, so the gap must be zero.
      temperature: of the student's sampling and loss.
      expected_model: the name that the teacher must give for its model.
      template_declared: the teacher is meant to have its own chat template.
      is_aligned: the teacher is asked across tokenizers.
      tolerance: nats by which two scores of one token may differ.

    Returns:
      All findings, of which none stops the run.

    Raises:
      PreflightFailed: a `TeacherMismatch` that names each failed check and what to change; it carries the findings.
      TeacherError: `sample_rows` are too few or too short to tell anything.
    """
    if not sample_rows or any(len(row.completion_ids) < 2 for row in sample_rows):
        raise TeacherError("a preflight needs at least 1 row, each with a completion of at least 2 ids")
    case = ScoreCase(
        teacher=teacher,
        rows=tuple(sample_rows),
        own_rows=tuple(sample_rows if student_rows is None else student_rows),
        want=want,
        temperature=temperature,
        tolerance=tolerance,
        local=local_check,
        student=student_model,
        is_student=is_student,
        is_aligned=is_aligned,
    )
    said: Any = teacher
    while hasattr(said, "inner"):  # a cache says nothing of itself
        said = said.inner
    findings = [
        *tokenizer_findings(
            student_tokenizer, teacher_tokenizer, template_declared=template_declared, is_aligned=is_aligned
        ),
        _width(said, student_tokenizer, student_model, want, is_aligned),
        _one_bos(case.rows, student_tokenizer),
        _prompts(case.rows, case.own_rows, student_tokenizer, teacher_tokenizer),
        _context(said, max_length),
        _support(said, want),
        _model(said, expected_model),
        *score_findings(case),
    ]
    if any(finding.stops for finding in findings):
        raise PreflightFailed(teacher.name, findings)
    return findings


def _width(teacher: Any, tokenizer: Any, student: Any, want: Want, is_aligned: bool) -> Finding:
    name, num_tokens = "vocabulary width", len(tokenizer)
    width, softmax = (getattr(teacher, attribute, None) for attribute in ("logit_width", "vocab_size"))
    if is_aligned or (width is None and softmax is None):
        return passed(name, f"{num_tokens} tokens; the teacher does not say how wide its logits are")
    narrow = min(value for value in (width, softmax) if value is not None)
    if narrow < num_tokens:
        return failed(
            name,
            f"the student's tokenizer has {num_tokens} ids, and the teacher knows {narrow}",
            "use a teacher of the same tokenizer, or align across tokenizers",
        )
    student_softmax = getattr(student, "vocab_size", None) or getattr(student, "logit_width", None)
    if want.distribution and student_softmax is not None and softmax is not None and student_softmax != softmax:
        return failed(
            name,
            f"the student's softmax runs over {student_softmax} ids and the teacher's over {softmax}",
            f"give both sides vocab_size={num_tokens}, the tokenizer's, so that padding is cut off before the softmax",
        )
    padding = f", {softmax - num_tokens} of them padding" if softmax is not None and softmax > num_tokens else ""
    return passed(name, f"{num_tokens} tokens; the teacher's softmax runs over {softmax or width} ids{padding}")


def _one_bos(rows: Sequence[Row], tokenizer: Any) -> Finding:
    bos = tokenizer.bos_token_id
    twice = [i for i, row in enumerate(rows) if bos is not None and row.prompt_ids[:2] == (bos, bos)]
    if twice:
        return failed(
            "BOS",
            f"the prompt of row {twice[0]} begins with BOS (id {bos}) twice ({len(twice)} of {len(rows)} rows)",
            "the template writes BOS and the tokenizer adds one: tokenise rendered text without special tokens",
        )
    return passed("BOS", f"no prompt begins with BOS (id {bos}) twice")


def _prompts(rows: Sequence[Row], own_rows: Sequence[Row], tokenizer: Any, teacher_tokenizer: Any) -> Finding:
    reader = tokenizer if teacher_tokenizer is None else teacher_tokenizer
    theirs, own = reader.decode(list(rows[0].prompt_ids)), tokenizer.decode(list(own_rows[0].prompt_ids))
    shown = f"student ({len(own_rows[0].prompt_ids)} ids) {own[-SHOWN:]!r}"
    if len(rows) != len(own_rows):
        return failed(
            "prompts", f"{len(rows)} rows for the teacher, {len(own_rows)} for the student", "pass them in pairs"
        )
    for i, (teacher_row, student_row) in enumerate(zip(rows, own_rows, strict=True)):
        if teacher_row.completion_ids != student_row.completion_ids:
            return failed(
                "prompts",
                f"row {i}: the teacher is given {len(teacher_row.completion_ids)} completion ids, which are not the "
                f"student's {len(student_row.completion_ids)}",
                "hand the student's sampled ids on as they are; nothing may be tokenised again",
            )
    if own == theirs:
        return passed("prompts", f"the same for both: {shown}")
    return passed("prompts", f"{shown}; teacher ({len(rows[0].prompt_ids)} ids) {theirs[-SHOWN:]!r}")


def _facts(teacher: Any) -> list[Any]:
    facts: Callable[[], Sequence[Any]] | None = getattr(teacher, "facts", None)
    return [] if facts is None else list(facts())


def _limit(teacher: Any) -> int | None:
    told = [getattr(teacher, "max_model_len", None), *(fact.max_model_len for fact in _facts(teacher))]
    return min((value for value in told if value is not None), default=None)


def _context(teacher: Any, max_length: int) -> Finding:
    try:
        limit = _limit(teacher)
    except TeacherError as error:
        return failed(
            "context length", f"the teacher does not answer: {error}", "start its server, or mend its address"
        )
    extra = int(getattr(teacher, "needs_extra_tokens", 1))
    if limit is None:
        return passed("context length", f"the run needs {max_length + extra}; the teacher does not say what it takes")
    if max_length + extra > limit:
        return failed(
            "context length",
            f"prompt and completion of {max_length} tokens need a context of {max_length + extra}, and the teacher has "
            f"{limit}",
            f"serve it with --max-model-len {max_length + extra}, or shorten prompts or completions by "
            f"{max_length + extra - limit}",
        )
    return passed("context length", f"{max_length + extra} of {limit}")


def _support(teacher: Any, want: Want) -> Finding:
    most = getattr(teacher, "max_logprobs", None)
    if most is not None and 0 <= most < want.top_k:
        return failed(
            "max_logprobs",
            f"the method asks for the top {want.top_k}, and the teacher gives {most} at most",
            f"serve it with --max-logprobs {want.top_k}, or set the method's top_k to {most} or less",
        )
    return passed("max_logprobs", f"top {want.top_k} is asked for" + ("" if most is None else f", {most} is the most"))


def _model(teacher: Any, expected: str | None) -> Finding:
    try:
        told = {getattr(teacher, "model_name", None), *(fact.model for fact in _facts(teacher))} - {None}
    except TeacherError as error:
        return failed("model name", f"the teacher does not answer: {error}", "start its server, or mend its address")
    if expected is not None and told and expected not in told:
        return failed(
            "model name",
            f"the teacher has {sorted(told)}, and {expected!r} was asked for",
            "serve the model that the experiment names, or name the one that is served",
        )
    return passed("model name", ", ".join(sorted(told)) or "the teacher does not say")
