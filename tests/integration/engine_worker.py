"""Run by torchrun, by `test_engines`: every method trains on the same rollouts, whatever the engine and its processes.

    python -m torch.distributed.run ... engine_worker.py OUT ENGINE [NAME ...]

Writes the logged numbers of each case, from the process of rank 0. With `-cut` behind the engine's name, the rows of a
forward are cut at `BUDGET` tokens.
"""

import gc
import json
import logging
import random
import re
import string
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import distributed
from transformers import PrinterCallback

from hybrid.config import EngineConfig
from hybrid.engine import join, this_rank, zero_settings
from hybrid.errors import HybridError
from hybrid.methods import METHODS, method_of
from hybrid.rewards.config import ExactConfig
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.local import LocalTeacher
from teachers.router import RoutedTeacher
from tests.tiny_models import model, tokenizer

STEPS = 2
ROWS = 6
"""Responses of a step; with two processes each has 3, so the second of three groups of 2 stands on both."""

RIGHT = ((0, 0, 1, 0, 1, 1), (0, 1, 0, 1, 0, 0))
"""Rewards of the rows of a step: an all-wrong group, a mixed one that stands on both processes, an all-right one."""

BUDGET = 26
"""Padded tokens of a micro-batch where rows are cut: two rows of a prompt of 4 and a response of 7 do fit."""

SETTINGS = {
    "kat": {"window": 2, "patience": 1, "min_samples": 4, "warmup_steps": 1, "n_exempt": 1},
    "mix": {"parts": [{"method": {"name": "grpo"}}, {"weight": 0.5, "method": {"name": "opd"}}]},
}
CASES = {
    **{name: {"name": name, **SETTINGS.get(name, {})} for name in METHODS},
    "opd reverse KL": {"name": "opd", "estimator": "reverse_kl"},
    "opd top-k": {"name": "opd", "top_k": 4},
    "opdvr reused": {"name": "opdvr"},
    "va_opd accumulated": {"name": "va_opd"},
    "opd routed": {"name": "opd"},
    "opd skipped": {"name": "opd"},
    "opd stopped": {"name": "opd"},
}
RUNS = {
    "opdvr reused": {"num_iterations": 2},
    "va_opd accumulated": {"gradient_accumulation_steps": 3},
    "opd stopped": {"bad_gradients": STEPS},
}


def rows() -> Dataset:
    letters = string.ascii_lowercase
    return Dataset.from_dict(
        {
            "prompt": [f"{letter * (1 + place % 3)}=" for place, letter in enumerate(letters)],
            "answer": list(letters),
            "demonstration": [letter * (place % 5) if place % 3 else None for place, letter in enumerate(letters)],
            "teacher_accuracy": [place / 26 for place in range(26)],
            "degraded": ["=" for _ in letters],
            "topic": ["a" if place % 3 else "b" for place in range(26)],
        }
    )


def routed() -> RoutedTeacher:
    """Two teachers, of which one process may have no row for either."""
    return RoutedTeacher({name: LocalTeacher(model(i), tokenizer(), name=name) for i, name in enumerate("ab")}, "topic")


def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: responses that depend on the step and on the row among those of all processes."""
    first = trainer.accelerator.process_index * len(prompts)
    answers = []
    for row, prompt in enumerate(prompts, start=first):
        chance = random.Random(f"{trainer.state.global_step}/{row}")
        is_right = RIGHT[trainer.state.global_step % 2][row]
        begin = prompt[0] if is_right else chance.choice("+-=")
        answers.append(begin + "".join(chance.choice("0123456789+-=#") for _ in range(chance.randint(0, 6))))
    ids = [tokenizer()(text)["input_ids"] for text in answers]
    return {
        "prompt_ids": [tokenizer()(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[*each, 1] if len(each) < 6 else each for each in ids],
        "logprobs": [[0.0] * (len(each) + (len(each) < 6)) for each in ids],
    }


def spoil(student: Any, trainer: Any, steps: range) -> None:
    """Makes the gradients of some updates NaN."""
    weight = student.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * float("nan") if trainer.state.global_step in steps else grad)


def settings_of(engine: str) -> dict[str, Any]:
    engine, _, cut = engine.partition("-")
    own = {"max_tokens_per_micro_batch": BUDGET} if cut else {}
    if not engine.startswith("zero"):
        return own
    config = EngineConfig.model_validate({"kind": "deepspeed", "stage": int(engine[-1]), "processes": 2})
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    zero = {"zero_optimization": zero_settings(config), "zero_allow_untested_optimizer": True}
    return own | {"deepspeed": {**batch, **zero, "gradient_clipping": "auto", "steps_per_print": sys.maxsize}}


def train(case: str, engine: str, folder: Path) -> list[dict[str, float]]:
    own = RUNS.get(case, {})
    micro = ROWS // this_rank().world // own.get("gradient_accumulation_steps", 1)
    args = HybridConfig(
        output_dir=str(folder / case),
        max_steps=STEPS * own.get("num_iterations", 1),
        per_device_train_batch_size=micro,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        seed=1,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **settings_of(engine),
        **own,
    )
    student = model(0)
    trainer = HybridTrainer(
        student,
        method=method_of(CASES[case]),
        teacher=routed() if "routed" in case else LocalTeacher(model(1), tokenizer()),
        reward_funcs=[ExactConfig(pattern="([a-z])").build()],
        args=args,
        train_dataset=rows(),
        processing_class=tokenizer(),
        rollout_func=recorded,
    )
    trainer.remove_callback(PrinterCallback)
    if "skipped" in case or "stopped" in case:
        spoil(student, trainer, range(1 if "skipped" in case else STEPS))
    try:
        trainer.train()
    except HybridError as error:
        told = re.search(r"(\d+) updates in a row, up to step (\d+),", str(error))
        return [{"left out": float(told[1]), "stopped in step": float(told[2])}] if told else []
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main(out: str, engine: str, *names: str) -> None:
    logging.disable(logging.WARNING)
    kind = "deepspeed" if engine.startswith("zero") else "ddp" if engine.startswith("ddp") else "single"
    join(EngineConfig.model_validate({"kind": kind, "processes": 1 if kind == "single" else 2}))
    torch.set_num_threads(1)
    gc.freeze()  # every trainer collects garbage when it begins; what was imported is none
    found = {}
    for case in names or CASES:
        began = time.perf_counter()
        found[case] = train(case, engine, Path(out).parent / engine)
        if this_rank().is_main:
            print(f"{engine} {case} {time.perf_counter() - began:.1f} s", flush=True)
    if this_rank().is_main:
        Path(out).write_text(json.dumps(found))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
