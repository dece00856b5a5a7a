"""The verifiers that may hang or eat memory on what a student writes, for a process that can be killed.

Run as a script (`python -P worker.py KIND LIMIT_S`) it answers one JSON line with one JSON line. The file imports
nothing of this project and, at the top, nothing but the standard library, so that a worker starts in about a second
and never loads torch. `hybrid/rewards/pool.py` is the other end.
"""

import contextlib
import functools
import json
import logging
import os
import re
import resource
import signal
import sys
import tokenize
from typing import Any

_MEMORY_BYTES = 4 << 30
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    re.error,
    tokenize.TokenError,
)
_PERCENT = re.compile(r"(.*?)\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)", re.IGNORECASE | re.DOTALL)


def same_mathematics(gold: str, answer: str, *, percent: str) -> dict[str, Any]:
    """Compares by math-verify, gold first.

    Args:
      gold: the reference answer, the content of a box.
      answer: the student's answer, the content of a box.
      percent: "either" lets `25%` equal 0.25 and 25; "fraction" lets it equal 0.25 alone.

    Returns:
      `{"equal": bool}`, or `{"unreadable_gold": True}`.
    """
    golds, answers = _readings(gold), _readings(answer)
    if not golds:
        return {"unreadable_gold": True}
    gold_percent, answer_percent = _percentage(gold), _percentage(answer)
    if gold_percent is None and answer_percent is None:
        return {"equal": _equal(golds, answers)}
    golds, answers = gold_percent or golds, answer_percent or answers
    if gold_percent is not None and answer_percent is not None:
        return {"equal": _equal(golds, answers)}
    if percent == "either" and _equal(golds, answers):
        return {"equal": True}
    if gold_percent is not None:
        return {"equal": _equal([number / 100 for number in golds], answers)}
    return {"equal": _equal(golds, [number / 100 for number in answers])}


def found_answer(text: str) -> str | None:
    """The answer that math-verify finds in a text without a box, in its own textual form; None where it finds none."""
    from math_verify import parse

    found = parse(text, extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return str(found[-1]) if found else None


def gym_score(task: str, params: dict[str, Any], entry: dict[str, Any], answer: str) -> dict[str, Any]:
    """Scores by the task's own `score_answer`.

    Some of reasoning-gym's verifiers raise on an answer of a form they do not expect. That is a verdict on the answer
    if, and only if, the same verifier accepts to score the entry's own reference.

    Args:
      task: a registered name of reasoning-gym.
      params: what the data set of the task was made with.
      entry: the data set's entry.
      answer: the student's answer.

    Returns:
      `{"score": float}`, with `"unreadable": "<what it raised>"` where the verifier choked on the answer.
    """
    dataset = _gym_dataset(task, json.dumps(packed(params), sort_keys=True))
    try:
        return {"score": float(dataset.score_answer(answer, entry))}
    except _UNREADABLE as error:
        dataset.score_answer(entry["answer"], entry)
        return {"score": 0.0, "unreadable": f"{type(error).__name__}: {error}"}


def packed(value: Any) -> Any:
    """A JSON value from which `unpacked` restores tuples and keys that are no strings, which JSON would lose.

    Raises:
      TypeError: the value holds something else than None, numbers, strings, lists, tuples and dicts.
    """
    if isinstance(value, tuple):
        return {"__tuple__": [packed(item) for item in value]}
    if isinstance(value, list):
        return [packed(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {"__items__": [[packed(key), packed(item)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot keep a {type(value).__name__} as JSON: {value!r:.80}")


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(unpacked(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {unpacked(key): unpacked(item) for key, item in value["__items__"]}
        return {key: unpacked(item) for key, item in value.items()}
    return value


def _readings(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(
        rf"\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )


def _equal(golds: list[Any], answers: list[Any]) -> bool:
    from math_verify import verify

    return verify(golds, answers, timeout_seconds=None)


def _percentage(text: str) -> list[Any] | None:
    """`[x]` for a text `x%` where x is a number, else None."""
    match = _PERCENT.fullmatch(text.strip())
    readings = _readings(match.group(1)) if match else []
    return readings if readings and getattr(readings[0], "is_number", False) else None


@functools.lru_cache(maxsize=64)
def _gym_dataset(task: str, params: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **unpacked(json.loads(params)))


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    if "gold" in request:
        return same_mathematics(request["gold"], request["answer"], percent=request["percent"])
    if "text" in request:
        return {"found": found_answer(request["text"])}
    record = unpacked(json.loads(request["record"]))
    return gym_score(record["task"], record["params"], record["entry"], request["answer"])


def main(kind: str, limit_s: float) -> None:
    """Answers requests until standard input closes; what a verifier raises is the last reply of this process.

    Args:
      kind: "math" or "gym", whose library is loaded and warm before the first request.
      limit_s: seconds of processor time after which a request kills this process, even one that lost its owner.
    """
    if kind == "gym":
        import reasoning_gym  # noqa: F401
    else:
        same_mathematics(r"\frac{1}{3}", r"1 + x\%", percent="either")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    replies = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    sys.excepthook = lambda kind, error, _: reply({"error": f"{kind.__name__}: {error}"})
    reply({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = _reply(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)  # before the reply, or the next question might be called the late one
        reply(answer)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(sys.argv[1], float(sys.argv[2]))
