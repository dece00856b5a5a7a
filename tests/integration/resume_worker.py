"""Run by `test_resume`: trains each case without a break, killed by SIGKILL between two steps, and resumed.

    python resume_worker.py FOLDER

Each training is a process of its own, forked from this one. Writes `CASE.unbroken.json` and `CASE.resumed.json`.
"""

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from hybrid.checkpoints import newest_good
from hybrid.methods import method_of
from hybrid.methods.base import ViewSpec
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.local import LocalTeacher
from tests.tiny_models import coin, model, prompts, tokenizer

STEPS, SAVE_EVERY = 12, 5
"""A generation batch is used for 4 steps and an epoch has 8, so a checkpoint at 5 or 10 stands within both."""

KAT = {"name": "kat", "window": 2, "patience": 1, "min_samples": 4, "warmup_steps": 1, "n_exempt": 1}
REVERSE_KL = {"name": "opd", "estimator": "reverse_kl"}
EMA = ViewSpec("self", None, {"sync": "ema", "decay": 0.5})
SNAPSHOT = ViewSpec("self", None, {"sync": "snapshot", "every": 3})
CASES = {
    "grpo": ("grpo", None, 11),
    "kat": (KAT, "local", 7),
    "sipo": ({"name": "sipo", "sync_every": 3, "contrast_context": "trajectory"}, None, 11),
    "ema": ({"name": "opdvr"}, EMA, 7),
    "snapshot reverse KL": (REVERSE_KL, SNAPSHOT, 7),
}
"""Method, teacher, and the step after which the run is killed."""


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(case: str, folder: Path, kill_at: int | None, checkpoint: Path | None) -> HybridTrainer:
    method, teacher, _ = CASES[case]
    args = HybridConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVE_EVERY,
        seed=3,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = HybridTrainer(
        model(0),
        method=method_of(method),
        teacher=LocalTeacher(model(1), tokenizer()) if teacher == "local" else teacher,
        reward_funcs=[coin],
        args=args,
        train_dataset=prompts(8),
        processing_class=tokenizer(),
        callbacks=[] if kill_at is None else [Kill(kill_at)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def apart(case: str, folder: Path, *, kill_at: int | None = None, resume: bool = False, out: Path | None = None) -> int:
    """Trains in a forked process; the status that it ended with."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        trainer = train(case, folder, kill_at, newest_good(folder, print) if resume else None)
        if out is not None:
            weights = {name: float(p.double().sum()) for name, p in trainer.model.named_parameters()}
            out.write_text(json.dumps({"log": trainer.state.log_history, "weights": weights}))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for case, (_, _, kill_at) in CASES.items():
        whole, broken = folder / case / "whole", folder / case / "broken"
        assert apart(case, whole, out=folder / f"{case}.unbroken.json") == 0
        assert apart(case, broken, kill_at=kill_at) == -signal.SIGKILL
        assert apart(case, broken, resume=True, out=folder / f"{case}.resumed.json") == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
