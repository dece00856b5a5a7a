"""What RSTG wants to know beforehand: how often the teacher is right on each prompt, and its shortest right answer.

`hybrid teacher demonstrate FILE` samples the teacher on the training prompts and writes the prompts again as
JSON Lines with two more columns, `teacher_accuracy` and `demonstration`, from which the experiment is then run.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from datasets import Dataset

from hybrid.config import ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.evaluate import Evaluation, Sampling, evaluate
from hybrid.pictures import PICTURE_COLUMNS
from hybrid.rewards import build_rewards
from hybrid.sources import model_folder, training_prompts
from hybrid.teacher_config import LocalTeacherConfig, ServedTeacherConfig, teachers_of


def demonstrate(
    config: ExperimentConfig, out: Path, *, samples: int = 8, report: Callable[[str, int, int], None] | None = None
) -> Mapping[str, float]:
    """Samples the teacher on every training prompt and writes prompts with its accuracy and shortest right answer.

    Args:
      config: the experiment; its teacher is a model that can be loaded here.
      out: the JSON Lines file; its folder is made.
      samples: answers per prompt (8 in the paper).
      report: progress.

    Returns:
      The teacher's mean accuracy, and the share of prompts with a demonstration.

    Raises:
      ConfigError: the experiment has no teacher of its own that could answer, or no reward.

    Reference:
      RSTG, teacher confidence omega = mean@8 and the shortest correct of the 8 samples (arXiv 2608.00782).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if config.teacher is None or not config.rewards:
        raise ConfigError("demonstrations need a teacher to give them and rewards to judge them")
    block = next(iter(teachers_of(config.teacher).values()))
    if not isinstance(block, LocalTeacherConfig | ServedTeacherConfig):
        raise ConfigError("teacher: demonstrations need a model (teacher.model), not the student or a recording")
    folder = model_folder(block.model, "teacher", report)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    prompts = training_prompts(config)
    if set(PICTURE_COLUMNS).intersection(prompts.column_names):
        raise ConfigError("data: demonstrations are kept as JSON Lines, which hold no pictures; use prompts of text")
    sampling = Sampling(
        samples=samples,
        max_completion_length=config.train.max_completion_length,
        temperature=config.train.temperature,
        top_p=config.train.top_p,
        seed=config.seed,
        success_at=config.evaluate.success_at if config.evaluate else 1.0,
    )
    part = None if report is None else lambda done, total: report("the teacher answers", done, total)
    chat = config.student.chat_template_kwargs if block.prompt is None else block.prompt.chat_template_kwargs
    rewards = build_rewards(config.rewards)
    found = evaluate(model, tokenizer, prompts, rewards, sampling, chat_template_kwargs=chat, report=part)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("wb") as file:
        for row in rows_of(prompts, found):
            file.write(orjson.dumps(row) + b"\n")
    partial.replace(out)  # never half a file under the name that experiments read
    return {
        "teacher_accuracy": float(found.right_PK.mean()),
        "with_demonstration": float(found.right_PK.any(1).mean()),
    }


def rows_of(prompts: Dataset, found: Evaluation) -> Iterator[dict[str, Any]]:
    """Each prompt's row with the two columns; `demonstration` is null where the teacher was never right."""
    for place, row in enumerate(prompts):
        right_K, length_K = found.right_PK[place], found.length_PK[place]
        shortest = int(np.where(right_K, length_K, np.iinfo(np.int64).max).argmin())
        text = found.texts[place][shortest] if right_K.any() else None
        columns = dict(row)  # pyright: ignore[reportArgumentType, reportCallIssue]
        yield {**columns, "teacher_accuracy": float(right_K.mean()), "demonstration": text}
