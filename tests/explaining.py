"""Record lines for tests of `hybrid explain`, and the command as a function that prints JSON."""

import json
from pathlib import Path

import torch

from hybrid.explain_command import run_explain


def written_to(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def response(prompt: str, rewarded: float | None, length: int, *, seed: int, teacher: bool = True) -> dict:
    """A line with every measurement there is."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float = 1.0) -> list[float]:
        return (scale * torch.rand(length, generator=generator, dtype=torch.float64)).tolist()

    def top() -> list[list[float]]:
        weights = torch.rand(length, 4, generator=generator, dtype=torch.float64) + 0.1
        return (weights / weights.sum(-1, keepdim=True)).log()[:, :3].tolist()

    def score() -> dict:
        return {"logprobs": numbers(-3.0), "top_ids": [[3, 1, 2]] * length, "top_logprobs": top()}

    names = ("teacher", "right", "wrong", "degraded", "reference", "student")
    return {
        "prompt_id": prompt,
        "response_id": f"{prompt}-{seed}",
        "token_ids": list(range(length)),
        "token_mask": [int(place != 1) for place in range(length)],
        "reward": rewarded,
        "truncated": seed % 2 == 0,
        "teacher_accuracy": 0.75,
        "student_logprobs": numbers(-3.0),
        "current_logprobs": numbers(-3.0),
        "entropies": numbers(2.0),
        "kl": numbers(),
        "scores": {name: score() if teacher or name == "student" else None for name in names},
        "demonstration": {"token_ids": [1, 2], "logprobs": [-0.5, -1.0]},
    }


FULL = [
    response("wrong", 0.0, 5, seed=1),
    response("wrong", 0.0, 3, seed=2),
    response("mixed", 1.0, 6, seed=3),
    response("mixed", 0.0, 4, seed=4),
    response("mixed", 1.0, 0, seed=5),
    response("mixed", 1.0, 3, seed=6, teacher=False),
    response("unscored", None, 2, seed=7),
    response("alone", 1.0, 4, seed=8),
]


def ask(file: Path, method: str | None = None, *settings: str, **options) -> str:
    """What the command prints with --json."""
    given = {"step": 0, "state": None, "as_json": True, "compare": None, "html": None} | options
    printed = run_explain(file, method, settings, **given)
    assert isinstance(printed, str)
    return printed


def read_again(printed: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(printed, parse_constant=refuse)


def explained(file: Path, method: str | None = None, *settings: str, **options) -> dict:
    return read_again(ask(file, method, *settings, **options))


def advantages(one: dict) -> list[list[float]]:
    return [row["advantages"] for row in one["responses"]]


TEACHER, STUDENT = [-1, -2, -0.5, -3], [-1.5, -1, -0.5, -0.2]


def scored(reward: float | None, prompt: str = "p", **more) -> dict:
    line = {"prompt_id": prompt, "token_ids": [1, 2, 3, 4], "reward": reward, "student_logprobs": STUDENT}
    return line | {"scores": {"teacher": {"logprobs": TEACHER}}} | more
