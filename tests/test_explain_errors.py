"""Each error of `hybrid explain` is one message that names the place, with exit code 2 and nothing else printed."""

import json
import re

import pytest

from tests.explaining import scored, written_to

NOT_A_NUMBER = "@"
TEXT = {"token_ids": [1], "logprobs": [-1.0]}


def changed(*path: str | int, to: object, lines: int = 2) -> str:
    """A record whose second line has something else at one place; `@` stands for NaN."""
    record = [
        scored(1, kl=[0.1] * 4, entropies=[0.1] * 4, truncated=False, teacher_accuracy=0.5, demonstration=TEXT)
        for _ in range(lines)
    ]
    record = json.loads(json.dumps(record))
    place = record[-1]
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return "".join(json.dumps(line).replace(f'"{NOT_A_NUMBER}"', "NaN") + "\n" for line in record)


LINE = r"rollouts.jsonl, line 2 \(response p/1\): "
PROMPT = r"rollouts.jsonl, line 2 \(prompt p\): "

WRONG = {
    "reward missing in one line": ("grpo", changed("reward", to=...), LINE + "reward is missing, .* write null"),
    "reward missing": (
        "grpo",
        changed("reward", to=..., lines=1),
        "needs reward, which no line of the record has; rec",
    ),
    "NaN reward": ("grpo", changed("reward", to=NOT_A_NUMBER), PROMPT + "reward is not a finite number"),
    "NaN log-prob": (
        "opd",
        changed("student_logprobs", 2, to=NOT_A_NUMBER),
        PROMPT + r"student_logprobs\[2\] is not a finite number",
    ),
    "NaN teacher": (
        "opd",
        changed("scores", "teacher", "logprobs", 3, to=NOT_A_NUMBER),
        PROMPT + r"scores.teacher.logprobs\[3\] is not a finite number",
    ),
    "length": ("grpo", changed("kl", to=[0.1]), LINE + "kl has 1 entries for 4 token_ids"),
    "teacher length": (
        "grpo",
        changed("scores", "teacher", "logprobs", to=[0.1]),
        LINE + "scores.teacher.logprobs has 1 entries for 4 token_ids",
    ),
    "entropies in one line": ("rstg", changed("entropies", to=...), LINE + "entropies is missing, and other lines"),
    "kl in one line": ("kat", changed("kl", to=...), LINE + "kl is missing, and other lines"),
    "truncated in one line": ("r2opd", changed("truncated", to=...), LINE + "truncated is missing, and other lines"),
    "no teacher": (
        "opd",
        changed("scores", "teacher", to=..., lines=1),
        r"needs scores.teacher.* \(it has no scores\)",
    ),
    "too far": (
        "kdrl",
        changed("scores", "teacher", "logprobs", 1, to=-1e200),
        r"kl loss of kdrl is inf.*scores.teacher.logprobs\[1\] of response p/1 is -1e\+200",
    ),
}


@pytest.mark.parametrize(("method", "text", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_a_wrong_record_is_one_message(run_hybrid, tmp_path, method, text, said, flags):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(text)
    code, out, complaint = run_hybrid("explain", "--method", method, *flags, file)
    assert (code, out) == (2, "")
    assert len(complaint.splitlines()) == 1
    assert re.search(said, complaint), complaint


@pytest.mark.parametrize("method", ["grpo", "constant"])
@pytest.mark.parametrize("key", ["kl", "entropies", "truncated", "teacher_accuracy", "scores"])
def test_what_a_method_does_not_read_may_be_missing_anywhere(run_hybrid, tmp_path, method, key):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(changed(key, to=...))
    assert run_hybrid("explain", "--method", method, "--json", file)[0] == 0


WRONG_CALL = {
    "html": (
        ("--method", "grpo", "--html", "nowhere/page.html"),
        "--html nowhere/page.html: cannot be written: No such",
    ),
    "state": (
        ("--method", "sipo", "--set", "baseline=confidence", "--state", "s.json"),
        "confidence_mean has 1 numbers",
    ),
    "too large": (
        ("--method", "constant", "--set", "value=1e308"),
        "constant ends in a number that is not finite; a setting, or",
    ),
    "no tensor": (
        ("--method", "dr_grpo", "--set", f"max_length={10**20}"),
        "dr_grpo: max_length is too large; got 10000",
    ),
    "compare": (("--compare", "grpo,grpoo"), "--compare grpoo: method.name: there is no 'grpoo'; did you mean grpo?"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_CALL.values(), ids=WRONG_CALL)
def test_a_wrong_call_is_one_message(run_hybrid, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text('{"confidence_mean": [1.0]}')
    view = {"logprobs": [-1.0] * 4}
    file = written_to(
        tmp_path / "rollouts.jsonl",
        scored(1) | {"scores": {"right": view, "wrong": view}},
    )
    code, out, complaint = run_hybrid("explain", *arguments, "--json", file)
    assert (code, out) == (2, "")
    assert said in complaint
