"""Run by `test_watchdog`: a training whose responses come from a server that accepts every question and answers none.

silent_rollouts FOLDER URL LIMIT_S
"""

import sys
import urllib.request
from pathlib import Path
from typing import Any

from hybrid.trainer import HybridConfig, HybridTrainer
from hybrid.watchdog import Watchdog
from tests.tiny_models import coin, model, prompts, tokenizer


def main() -> None:
    folder, url, limit_s = sys.argv[1:]

    def asked(prompts: list[str], trainer: Any) -> dict[str, Any]:
        with urllib.request.urlopen(url) as reply:
            return reply.read()

    dog = Watchdog(Path(folder), limit_s=float(limit_s), explain={"generation": f"by the server at {url}"})
    args = HybridConfig(folder, max_steps=1, per_device_train_batch_size=4, num_generations=4, disable_tqdm=True)
    trainer = HybridTrainer(
        model(0),
        "grpo",
        reward_funcs=[coin],
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        callbacks=[dog],
        rollout_func=asked,
        progress=dog.note,
    )
    with dog:
        trainer.train()
