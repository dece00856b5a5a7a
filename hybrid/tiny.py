"""The embedded default: a weak tiny student and a better but imperfect tiny teacher, made on the spot and cached.

Both are Qwen2 models of some 100 000 parameters over the same byte-level tokenizer; they are taught by a few seconds of
supervised training on a task of `hybrid.tiny_tasks`, stopped as soon as they are as good as their role wants. Nothing
is downloaded. What makes such small models learn in seconds: problems of one length, which let an attention head find
the next number by its distance; RoPE with a small base, whose waves are as short as the texts; and a wide
initialisation, without which the tied embedding is almost flat at this width.

Head size 32 is the smallest that vLLM serves on a CPU.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hybrid.errors import ConfigError
from hybrid.pretraining import train_until
from hybrid.tiny_cache import FACTS_FILE, Progress, cache_root, made_once
from hybrid.tiny_tasks import (
    ANSWER_PATTERN,
    HINT_TEMPLATE,
    TASKS,
    Split,
    degraded_prompt,
    draw_problem,
    render_working,
    tiny_dataset,
    tiny_task,
)

__all__ = [
    "ANSWER_PATTERN",
    "HINT_TEMPLATE",
    "TASKS",
    "Progress",
    "Recipe",
    "Role",
    "cache_root",
    "ensure_tiny",
    "recipe_for",
    "tiny_dataset",
    "tiny_tokenizer",
]

Role = Literal["student", "teacher"]
HINT_SLIP = 0.3
HEAD_SIZE = 32
IGNORED = -100
VALIDATION_ROWS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'system' %}|{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one tiny model is made; its content is part of the cache folder's name.

    Attributes:
      task: a name in `TASKS`.
      role: a student is taught the truth, a teacher what its task's teachers believe.
      target: stop when the model gives this probability to a whole held-out working, on average. With right workings
        it is the accuracy of one sampled answer, up to wrong workings that end in the right answer.
      hidden_size: width; a multiple of 32.
      intermediate_size: width of the MLPs.
      num_layers: decoder layers.
      batch_size: rows of an optimizer step.
      matrix_lr: Muon's learning rate, for the weight matrices of the layers.
      other_lr: AdamW's learning rate, for the embedding, the norms and the biases.
      decay_steps: steps over which both fall towards a tenth.
      max_steps: optimizer steps after which a target that was not reached is an error.
      context_share: share of rows whose prompt carries a right hint, a wrong hint or a hidden number.
      slip: chance of a wrong step in what is taught; see `Problem.totals`. It bounds the accuracy that can be reached.
      seed: of the weights and of the rows.
    """

    task: str
    role: Role
    target: float
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    batch_size: int = 64
    matrix_lr: float = 0.03
    other_lr: float = 4e-3
    decay_steps: int = 600
    max_steps: int = 1500
    context_share: float = 0.2
    slip: float = 0.0
    seed: int = 0


RECIPES: Mapping[tuple[str, str], Recipe] = MappingProxyType(
    {
        (recipe.task, recipe.role): recipe
        for recipe in (
            Recipe(task="chain_sum", role="student", slip=0.5, target=0.105),
            Recipe(task="chain_sum", role="teacher", target=0.80, intermediate_size=256),
            Recipe(task="carry_sum", role="student", slip=0.5, target=0.105),
            Recipe(task="carry_sum", role="teacher", target=0.92, intermediate_size=256),
            Recipe(task="long_sum", role="student", slip=0.5, target=0.012),
            Recipe(task="long_sum", role="teacher", target=0.80, intermediate_size=256, decay_steps=900),
        )
    }
)


def recipe_for(task: str, role: str) -> Recipe:
    """Looks up how the tiny model of a task and role is made.

    Raises:
      ConfigError: the task or the role does not exist.
    """
    tiny_task(task)
    if (task, role) not in RECIPES:
        raise ConfigError(f"no tiny model has the role {role!r}; there are student and teacher")
    return RECIPES[task, role]


def ensure_tiny(task: str, role: str, *, progress: Progress | None = None, cache_dir: Path | str | None = None) -> Path:
    """Returns the folder of a tiny model with its tokenizer, and makes it first where the cache has none.

    Two processes that ask at once build it once; a build that is cut off leaves nothing that looks finished.

    Args:
      task: a name in `TASKS`.
      role: `student` or `teacher`.
      progress: told how far the training is.
      cache_dir: where to keep the models; see `cache_root`.

    Returns:
      A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`; `tiny.json` in it holds
      the recipe, the steps taken and the validation probability reached.

    Raises:
      ConfigError: the task or the role does not exist.
      DataError: the cache folder cannot be written.
      HybridError: the training did not reach its target.
    """
    recipe = recipe_for(task, role)
    return made_once(
        f"tiny-{task}-{role}-{content_key(recipe)}",
        lambda folder, report: _build(recipe, folder, report),
        what=f"tiny {role} for {task}",
        max_steps=recipe.max_steps,
        progress=progress,
        cache_dir=cache_dir,
    )


def content_key(recipe: Recipe) -> str:
    """A short hash of what shapes the folder: recipe, architecture, tokenizer, the texts that are taught."""
    rng, tokenizer = random.Random(recipe.seed), tiny_tokenizer()
    sample = [training_text(recipe, "train", rng) for _ in range(64)]
    words = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, CHAT_TEMPLATE]
    content = [asdict(recipe), _architecture(recipe).to_diff_dict(), words, sample]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per byte, so that any text can be written, and read back in Unicode's NFC.

    Padding stands on the left. `AutoTokenizer` reads it as a Qwen2 tokenizer, which brings NFC and would add a token
    of its own, beyond the model's vocabulary, for what is unknown; so the end token, never needed for that, is named.
    A chat is rendered as its contents in a row; a system message is a hint and is closed by `|`.
    """
    specials = ["<|pad|>", "<|bos|>", "<|eos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=specials[0],
        bos_token=specials[1],
        eos_token=specials[2],
        unk_token=specials[2],
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def training_text(recipe: Recipe, split: Split, rng: random.Random) -> tuple[str, str]:
    """Draws a prompt and the completion that this role is taught for it.

    A hint is the end of the completion below it, right for half of the rows, so that a hinted model knows its own
    slips in hindsight: under a right hint it expects none, under a wrong one it looks for the place.
    """
    task = tiny_task(recipe.task)
    problem = draw_problem(task, split, rng)
    drop_carry = task.teacher_drops_carry and recipe.role == "teacher"
    context = rng.choice(("hint", "degraded")) if rng.random() < recipe.context_share else "none"
    slip = recipe.slip
    if context == "hint":
        slip = rng.choice((0.0, max(recipe.slip, HINT_SLIP)))
    totals = problem.totals(drop_carry=drop_carry, slip=slip, rng=rng)
    prompt = problem.prompt
    if context == "hint":
        prompt = HINT_TEMPLATE.format(answer=totals[-1], prompt=prompt)
    elif context == "degraded":
        prompt = degraded_prompt(problem, rng.randrange(task.num_terms))
    return prompt, render_working(totals)


def encode_rows(
    tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]]
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Turns prompts and completions into ids, padded on the right, and labels, -100 where nothing is learnt."""
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    completions = tokenizer([completion for _, completion in rows])["input_ids"]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True)) + 1
    ids_BT = torch.full((len(rows), width), int(tokenizer.pad_token_id))  # pyright: ignore[reportArgumentType]
    labels_BT = torch.full_like(ids_BT, IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        target = [*completion, tokenizer.eos_token_id]
        end = len(prompt) + len(target)
        ids_BT[row, :end] = torch.tensor(prompt + target)
        labels_BT[row, len(prompt) : end] = torch.tensor(target)
    return ids_BT, labels_BT


def working_probability(model: Qwen2ForCausalLM, ids_BT: Int[Tensor, "B T"], labels_BT: Int[Tensor, "B T"]) -> float:
    """The mean over rows of the probability of the whole labelled completion: the accuracy of one sampled working."""
    with torch.no_grad():
        losses = functional.cross_entropy(
            model(ids_BT).logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="none"
        )
    return losses.view(len(ids_BT), -1).sum(1).neg().exp().mean().item()


def _architecture(recipe: Recipe) -> Qwen2Config:
    tokenizer = tiny_tokenizer()
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // HEAD_SIZE,
        num_key_value_heads=recipe.hidden_size // HEAD_SIZE,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportArgumentType]
        bos_token_id=tokenizer.bos_token_id,  # pyright: ignore[reportArgumentType]
        eos_token_id=tokenizer.eos_token_id,  # pyright: ignore[reportArgumentType]
        dtype="float32",
    )


def _build(recipe: Recipe, folder: Path, report: Progress) -> None:
    """Trains a model and saves it with its tokenizer."""
    torch.manual_seed(recipe.seed)
    tokenizer = tiny_tokenizer()
    model, facts = _train(recipe, tokenizer, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / FACTS_FILE).write_text(json.dumps({"recipe": asdict(recipe), **facts}, indent=2) + "\n")


def _train(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, report: Progress
) -> tuple[Qwen2ForCausalLM, dict[str, float]]:
    """Supervised training until the target; returns the model and what was reached in how many steps."""
    rng, held_out_rng = random.Random(recipe.seed), random.Random(f"validation/{recipe.seed}")
    model = Qwen2ForCausalLM(_architecture(recipe))
    plain = replace(recipe, context_share=0.0, slip=0.0)
    held_out = encode_rows(
        tokenizer, [training_text(plain, "validation", held_out_rng) for _ in range(VALIDATION_ROWS)]
    )

    def loss() -> Tensor:
        rows = [training_text(recipe, "train", rng) for _ in range(recipe.batch_size)]
        ids_BT, labels_BT = encode_rows(tokenizer, rows)
        logits_BTV = model(ids_BT).logits[:, :-1]
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)

    return train_until(
        model,
        [weight for weight in model.model.layers.parameters() if weight.ndim == 2],
        recipe,
        loss=loss,
        reached=lambda: working_probability(model, *held_out),
        what=f"tiny {recipe.role} for {recipe.task}",
        report=report,
    )
