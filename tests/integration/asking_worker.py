"""Run by torchrun on two processes, by `test_asking`: a teacher that only one of them has rows for, or that fails one.

python -m torch.distributed.run ... asking_worker.py OUT
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from torch import distributed

from hybrid.config import EngineConfig
from hybrid.engine import join, this_rank
from hybrid.methods import method_of
from hybrid.trainer import HybridConfig, HybridTrainer
from teachers.errors import TeacherUnavailable
from teachers.local import LocalTeacher
from teachers.protocol import SAMPLED
from tests.tiny_models import model, tokenizer


class Remote:
    """Does not take part in what the other process does, as a server; fails the calls of one rank from a step on."""

    name, is_remote = "remote", True

    def __init__(self, fails_in: int | None):
        self.inner, self.fails_in, self.calls = LocalTeacher(model(1), tokenizer()), fails_in, 0

    def score(self, rows, want=SAMPLED):
        self.calls += 1
        if self.calls == self.fails_in:
            raise TeacherUnavailable("the server is gone")
        return self.inner.score(rows, want)

    def close(self):
        self.inner.close()


def first_group_wrong(prompts, **columns):
    return [0.0 if this_rank().rank == 0 else 1.0 for _ in prompts]


def train(folder: Path, method: dict, fails_in: int | None) -> HybridTrainer:
    args = HybridConfig(
        output_dir=str(folder), max_steps=3, max_completion_length=6, seed=3, disable_tqdm=True, logging_steps=1,
        save_strategy="no", use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["a=", "b="] * 8, "teacher_accuracy": [0.5] * 16})
    trainer = HybridTrainer(
        model(0), method=method_of(method), teacher=Remote(fails_in), reward_funcs=[first_group_wrong], args=args,
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return trainer


def main(out: Path) -> None:
    join(EngineConfig(kind="ddp", processes=2))
    rank = this_rank().rank
    one_sided = train(out / "one", {"name": "rstg", "sft": "off"}, None)
    told = {"log": [entry for entry in one_sided.state.log_history if "loss" in entry]}
    told["calls"] = one_sided.scorers["teacher"].teacher.calls
    try:
        train(out / "fails", {"name": "opd"}, 3 if rank == 1 else None)
    except TeacherUnavailable as error:
        told["error"] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(told))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
