"""Checks of a preflight that ask the teacher: are these log-probs, of the right tokens, the same each time?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from teachers.errors import TeacherError
from teachers.findings import Finding, failed, passed, warned
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.scores import TeacherScores

FLOOR = -1000.0
"""Log-probs below it are no measurement: servers write -9999 for minus infinity."""


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """What is asked of a teacher, and whom it is compared with.

    Attributes:
      teacher: under examination.
      rows: as the teacher sees them, each with 2 completion ids at least.
      own_rows: the same rows as the student sees them.
      want: what the method will ask for.
      temperature: of the student.
      tolerance: nats by which two scores of one token may differ.
      local: a teacher of this process with the same weights.
      student: the student as a teacher.
      is_student: teacher and student have the same weights and prompt.
      is_aligned: the teacher has another tokenizer; prompts hold its ids, completions the student's.
    """

    teacher: Teacher
    rows: Sequence[Row]
    own_rows: Sequence[Row]
    want: Want
    temperature: float
    tolerance: float
    local: Teacher | None = None
    student: Teacher | None = None
    is_student: bool = False
    is_aligned: bool = False


def score_findings(case: ScoreCase) -> list[Finding]:
    """Asks the teacher; comparisons are made only where its numbers are sound in themselves."""
    findings: list[Finding] = []
    try:
        scores = case.teacher.score(case.rows, case.want)
        findings.append(_complete(case, scores))
        if findings[0].ok:
            findings += [_plausible(scores), _temperature(case, scores), _top(case.want, scores)]
        if not any(finding.stops for finding in findings):
            for check in (_twice, _one_token, _boundary, _against_local, _gap):
                findings.append(check(case, scores))
    except TeacherError as error:
        findings.append(failed("scores", f"asking the teacher ended in: {error}", "see the message"))
    return findings


def _complete(case: ScoreCase, scores: TeacherScores) -> Finding:
    if scores.failures:
        row, reason = next(iter(scores.failures.items()))
        return failed(
            "scores",
            f"{len(scores.failures)} of {len(case.rows)} rows were not scored; row {row}: {reason}",
            "see the reason; in a run such rows would be masked",
        )
    counts = scores.valid_BT.sum(1).tolist()
    lengths = [len(row.completion_ids) for row in case.rows]
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count == 0 or count > length:
            return failed(
                "scores",
                f"row {row} has {length} completion ids and {count} scores",
                "there must be one for each id; look at the teacher's transport",
            )
    share = sum(counts) / sum(lengths)
    return passed("scores", f"{sum(counts)} of {sum(lengths)} tokens were scored ({share:.0%})")


def _plausible(scores: TeacherScores) -> Finding:
    name, values = "log-probs", scores.logprob_BT[scores.valid_BT]
    fix = "the server's weights or its dtype are broken, or its answer was misread; score one sequence by hand"
    if bool(values.isnan().any()) or bool((values > 1e-4).any()):
        worst = "nan" if bool(values.isnan().any()) else f"{float(values.max()):.4f}"
        return failed(name, f"a log-prob must be at most 0; one is {worst}", fix)
    zero_rows = ((scores.logprob_BT == 0) | ~scores.valid_BT).all(1) & scores.valid_BT.any(1)
    if bool(zero_rows.any()):
        row = int(zero_rows.nonzero()[0])
        return failed(name, f"row {row} is 0 (probability 1) at each of its tokens: a failed call in disguise", fix)
    if bool((values < FLOOR).any()):
        num = int((values < FLOOR).sum())
        return warned(
            name,
            f"{num} of {values.numel()} are below {FLOOR:.0f}, as servers write minus infinity",
            "bound the gap in the method (a ratio clip); such a token outweighs all others",
        )
    return passed(name, f"between {float(values.min()):.3f} and {float(values.max()):.3f} nats")


def _temperature(case: ScoreCase, scores: TeacherScores) -> Finding:
    temperature = case.temperature
    if scores.temperature != temperature:
        return failed(
            "temperature",
            f"the student is sampled and trained at {temperature}, and the teacher's log-probs hold at "
            f"{scores.temperature}",
            f"set the student's temperature to {scores.temperature}, or use a local teacher, which takes any; dividing "
            "a log-prob by a temperature is wrong",
        )
    return passed("temperature", f"{temperature} for both")


def _top(want: Want, scores: TeacherScores) -> Finding:
    name, top_BTK = "support", scores.top_logprob_BTK
    num_wanted = want.top_k if want.candidates_BTK is None else want.candidates_BTK.shape[2]
    if not num_wanted:
        return passed(name, "sampled tokens only")
    if top_BTK is None or scores.top_ids_BTK is None or top_BTK.shape[2] != num_wanted:
        got = "none" if top_BTK is None else str(top_BTK.shape[2])
        return failed(name, f"{num_wanted} ids for each token were asked for, and {got} came", "look at the transport")
    mass_BT = top_BTK.double().exp().sum(-1)
    most = float(mass_BT[scores.valid_BT].max())
    if want.candidates_BTK is None and most > 1 + 1e-3:
        return failed(
            name,
            f"the probabilities of one support add up to {most:.4f}",
            "they are no distribution: a temperature was applied to log-probs, or ids stand twice",
        )
    if want.candidates_BTK is None and bool((top_BTK[..., 1:] > top_BTK[..., :-1]).any()):
        return failed(name, "it is not in falling order of probability", "the answer's entries were misread")
    return passed(name, f"{num_wanted} ids for each token; their probabilities add up to {most:.4f} at most")


def _twice(case: ScoreCase, scores: TeacherScores) -> Finding:
    candidates = case.want.candidates_BTK
    turned = case.want if candidates is None else replace(case.want, candidates_BTK=candidates.flip(0))
    straight = _worst(scores, case.teacher.score(case.rows, case.want).logprob_BT)
    order = _worst(scores, case.teacher.score(case.rows[::-1], turned).logprob_BT.flip(0))
    if not max(straight, order) <= case.tolerance:
        return failed(
            "same answer twice",
            f"scores of one token differ by {straight:.4f} nats when asked again and by {order:.4f} in another order",
            "a cache of prompt prefixes answers for other tokens, or rows are mixed up; update the server, or switch "
            "its prefix caching off",
        )
    return passed("same answer twice", f"to {max(straight, order):.2g} nats, in another order too")


def _one_token(case: ScoreCase, scores: TeacherScores) -> Finding:
    name = "one-token answers"
    if getattr(case.teacher, "is_recording", False):
        return passed(name, "a recording answers for whole rollouts only")
    short = case.teacher.score([replace(row, completion_ids=row.completion_ids[:1]) for row in case.rows], SAMPLED)
    told = "when it is the whole answer"
    return _same_first(case, scores.logprob_BT[:, :1], scores.valid_BT[:, :1], short, name, told)


def _boundary(case: ScoreCase, scores: TeacherScores) -> Finding:
    name = "prompt boundary"
    if getattr(case.teacher, "is_recording", False):
        return passed(name, "a recording answers for whole rollouts only")
    if case.is_aligned:
        return passed(name, "a student's id has no place in the prompt of a teacher with another tokenizer")
    moved = [
        replace(row, prompt_ids=(*row.prompt_ids, row.completion_ids[0]), completion_ids=row.completion_ids[1:])
        for row in case.rows
    ]
    told = "when the token before it is moved into the prompt"
    after = case.teacher.score(moved, SAMPLED)
    return _same_first(case, scores.logprob_BT[:, 1:2], scores.valid_BT[:, 1:2], after, name, told)


def _same_first(
    case: ScoreCase, before_B1: Tensor, valid_B1: Tensor, after: TeacherScores, name: str, when: str
) -> Finding:
    both_B1 = valid_B1 & after.valid_BT[:, :1].to(valid_B1.device)
    if not bool(both_B1.any()):
        return failed(
            name,
            f"no token is scored {when}",
            "each completion token must be scored; the teacher drops the first or last",
        )
    difference_B1 = (before_B1 - after.logprob_BT[:, :1].to(before_B1)).abs().masked_fill(~both_B1, 0.0)
    worst, row = float(difference_B1.max()), int(difference_B1[:, 0].argmax())
    if not worst <= case.tolerance:
        return failed(
            name,
            f"row {row}: the same token scores {float(before_B1[row]):.4f}, and {float(after.logprob_BT[row, 0]):.4f} "
            f"{when}",
            "the scores stand one position off: value t must belong to completion token t",
        )
    return passed(name, f"the same to {worst:.2g} nats")


def _against_local(case: ScoreCase, scores: TeacherScores) -> Finding:
    name = "against a local model"
    if case.local is None:
        return passed(name, "there is none of the same weights here")
    expected = case.local.score(case.rows, SAMPLED)
    worst = _worst(scores, expected.logprob_BT)
    if worst <= case.tolerance:
        return passed(name, f"the same to {worst:.2g} nats")
    for shift, what in ((1, "late"), (-1, "early")):
        if _worst_shifted(scores, expected, shift) <= case.tolerance:
            return failed(
                name,
                f"the scores equal those of the local model one position {what}",
                "value t must belong to completion token t; the first entry of prompt_logprobs is empty and counts",
            )
    return failed(
        name,
        f"the worst token differs by {worst:.4f} nats, more than {case.tolerance}",
        "the two have other weights, another temperature or another prompt; compare model name, revision and dtype",
    )


def _gap(case: ScoreCase, scores: TeacherScores) -> Finding:
    name = "gap to the student"
    if case.student is None:
        return passed(name, "not looked at")
    own = case.student.score(case.own_rows, SAMPLED)
    worst = _worst(scores, own.logprob_BT)
    if case.is_student and not worst <= case.tolerance:
        return failed(
            name,
            f"teacher and student have the same weights and prompt, and one token differs by {worst:.4f} nats",
            "both must be scored with the same ids, template, temperature and dtype; a gap here is noise that the run "
            "would train on",
        )
    if not case.is_student and worst == 0.0:
        return warned(
            name,
            "the teacher scores every token exactly as the student does: the distillation signal is identically zero",
            "use another teacher, or give this one a context that the student does not see",
        )
    return passed(name, f"at most {worst:.4f} nats on one token")


def _worst(scores: TeacherScores, other_BT: Tensor) -> float:
    difference_BT = (scores.logprob_BT - other_BT.to(scores.logprob_BT)).abs()
    return float(difference_BT[scores.valid_BT].max())


def _worst_shifted(scores: TeacherScores, expected: TeacherScores, shift: int) -> float:
    ours_BT, theirs_BT = scores.logprob_BT, expected.logprob_BT.to(scores.logprob_BT)
    moved_BT = torch.roll(theirs_BT, shift, dims=1)
    inner_BT = scores.valid_BT & torch.roll(expected.valid_BT.to(scores.valid_BT.device), shift, dims=1)
    inner_BT[:, 0 if shift > 0 else -1] = False
    if not bool(inner_BT.any()):
        return float("inf")
    return float((ours_BT - moved_BT).abs()[inner_BT].max())
