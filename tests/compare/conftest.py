"""Runs made up from a seed: three methods with clear differences, two tasks, one crashed run, recorded answers."""

import json

import numpy as np
import pytest

from hybrid.compare.load import RunData

STEPS = np.arange(0, 101, 10.0)
GAIN = {"grpo": 0.15, "opd": 0.3, "opdvr": 0.45}


def _made_run(method, seed, task="sums", status="FINISHED", artifacts=None, start_ms=0):
    rng = np.random.default_rng([seed, len(task), *method.encode()])
    upto = STEPS if status == "FINISHED" else STEPS[:5]
    grown = 1 - np.exp(-upto / 40)
    start = 0.2 + 0.05 * np.random.default_rng(seed).random()
    train = np.arange(1, upto[-1] + 1)
    avg = start + GAIN[method] * grown + 0.02 * rng.standard_normal(len(upto))
    curves = {
        "eval/avg_at_4": (upto, avg),
        "eval/pass_at_4": (upto, np.minimum(avg + 0.15, 1.0)),
        "reward": (train, 0.2 + GAIN[method] * (1 - np.exp(-train / 40)) + 0.05 * rng.standard_normal(len(train))),
        "train/loss": (train, np.exp(-train / 50) + 0.05 * rng.standard_normal(len(train))),
        "loss/kl": (train, 0.3 * np.exp(-train / 30)),
        "kept/outcome_agrees": (train, 0.5 + 0.1 * rng.standard_normal(len(train))),
        "gap/mean": (train, -0.5 * np.exp(-train / 40)),
        "entropy": (train, 1.2 * np.exp(-train / 80)),
        "response_length/mean": (train, 30 + 5 * np.sin(train / 20)),
        "rollouts/total": (train, 32 * train),
        "tokens/total": (train, 900 * train),
        "teacher_tokens/total": (train, (0 if method == "grpo" else 900) * train),
        "time/total_s": (train, (0.4 if method == "grpo" else 0.6) * train),
    }
    return RunData(
        method=method,
        seed=seed,
        task=task,
        status=status,
        params={},
        curves=curves,
        tags={},
        artifacts=artifacts,
        run_id=f"{method}-{seed}-{task}-{start_ms}",
        start_ms=start_ms,
    )


def _recorded(method, prompt, reward, step, text="12 + 30 = 42 </script><b>é 😀"):
    tokens = [piece + " " for piece in text.split()]
    sign = 1.0 if reward else -1.0
    advantages = [0.0 if index == 0 else sign * index / len(tokens) for index in range(len(tokens))]
    return {
        "prompt_id": prompt,
        "prompt": f"What is {prompt}?",
        "token_ids": list(range(len(tokens))),
        "tokens": tokens,
        "reward": reward,
        "step": step,
        "advantages": advantages,
        "kl_weights": [0.5 * abs(one) for one in advantages],
    }


@pytest.fixture(scope="session")
def made_run():
    return _made_run


@pytest.fixture(scope="session")
def recorded():
    return _recorded


@pytest.fixture
def runs(tmp_path):
    made = []
    for method in GAIN:
        for seed in range(8):
            folder = tmp_path / f"{method}-{seed}"
            (folder / "rollouts").mkdir(parents=True)
            rows = [
                _recorded(method, prompt, reward, step)
                for prompt in ("12+30", "5+6")
                for reward in (0.0, 1.0)
                for step in (10, 90)
            ]
            (folder / "rollouts" / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            for task in ("sums", "words"):
                failed = (method, seed, task) == ("opd", 3, "sums")
                made.append(_made_run(method, seed, task, "FAILED" if failed else "FINISHED", folder))
    return made
