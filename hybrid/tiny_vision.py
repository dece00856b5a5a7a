"""The tiny vision models: a weak student and a good teacher of the Qwen3-VL family, made on the spot and cached.

Each has some 150 000 parameters: one layer of vision (with its deep-stack branch), two of text, the byte tokenizer
of `hybrid.tiny` with the family's vision tokens, and the image processor of the family with PIL. They are taught on the
figures of `hybrid.tiny_figures` as `hybrid.tiny` teaches its text models, and stopped as soon as they are as good as
their role wants. The teacher has never seen a degraded figure, as no teacher of the paper has.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from hybrid.errors import ConfigError
from hybrid.pretraining import train_until
from hybrid.tiny import IGNORED, Role, tiny_tokenizer
from hybrid.tiny_cache import FACTS_FILE, Progress, made_once
from hybrid.tiny_figures import PROMPT, SIDE, Figure, draw_figure
from hybrid.tiny_tasks import VISION_TASKS
from teachers.processors import IMAGE_TOKEN, PictureProcessor

START_TOKEN, END_TOKEN, VIDEO_TOKEN = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
PATCH_SIDE, MERGE = 4, 2
"""Pixels of a patch's side, and patches along the side of what becomes one token."""

HEAD_SIZE, VISION_HEAD_SIZE = 32, 16
VALIDATION_ROWS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{START_TOKEN}{IMAGE_TOKEN}{END_TOKEN}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class VisionRecipe:
    """How one tiny vision model is made; its content is part of the cache folder's name.

    Attributes:
      task: a name in `VISION_TASKS`.
      role: which of the two.
      target: stop when the model gives this probability to a whole held-out working, on average.
      hidden_size: width of the text layers; a multiple of 32.
      intermediate_size: width of their MLPs.
      num_layers: text layers.
      vision_size: width of the vision layer; a multiple of 16.
      batch_size: figures of an optimizer step.
      matrix_lr: Muon's learning rate, for the weight matrices of the layers.
      other_lr: AdamW's learning rate, for everything else.
      decay_steps: steps over which both fall towards a tenth.
      max_steps: optimizer steps after which a target that was not reached is an error.
      seed: of the weights and of the figures.
    """

    task: str
    role: Role
    target: float
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    vision_size: int = 32
    batch_size: int = 64
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    decay_steps: int = 400
    max_steps: int = 800
    seed: int = 0


RECIPES: Mapping[tuple[str, str], VisionRecipe] = MappingProxyType(
    {
        ("count_dots", "student"): VisionRecipe(task="count_dots", role="student", target=0.15),
        ("count_dots", "teacher"): VisionRecipe(task="count_dots", role="teacher", target=0.85, seed=1),
    }
)


def ensure_tiny_vision(
    task: str, role: Role, *, progress: Progress | None = None, cache_dir: Path | str | None = None
) -> Path:
    """Returns the folder of a tiny vision model with its processor, and makes it first where the cache has none.

    Args:
      task: a name in `VISION_TASKS`.
      role: `student` or `teacher`.
      progress: told how far the training is.
      cache_dir: where to keep the models; see `hybrid.tiny_cache.cache_root`.

    Returns:
      A folder for `AutoModelForImageTextToText.from_pretrained` and `teachers.processors.load_processor`; `tiny.json`
      in it holds the recipe, the steps taken and the validation probability reached.

    Raises:
      ConfigError: the task or the role does not exist.
      DataError: the cache folder cannot be written.
      HybridError: the training did not reach its target.
    """
    if (task, role) not in RECIPES:
        raise ConfigError(
            f"no tiny vision model is called {task!r} in the role {role!r}; there is {', '.join(VISION_TASKS)}, "
            "as student and teacher"
        )
    recipe = RECIPES[task, role]
    return made_once(
        f"tiny-{task}-{role}-{content_key(recipe)}",
        lambda folder, report: _build(recipe, folder, report),
        what=f"tiny {role} for {task}",
        max_steps=recipe.max_steps,
        progress=progress,
        cache_dir=cache_dir,
    )


def content_key(recipe: VisionRecipe) -> str:
    """A short hash of everything that shapes the model: the recipe, the architecture, the figures it is taught."""
    rng = random.Random(recipe.seed)
    figures = [draw_figure("train", rng) for _ in range(8)]
    pixels = [hashlib.sha256(figure.draw().tobytes()).hexdigest() for figure in figures]
    content = [asdict(recipe), architecture(recipe).to_diff_dict(), CHAT_TEMPLATE, PROMPT, figures, pixels]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def vision_processor() -> PictureProcessor:
    """The tokenizer of one token per byte with the family's vision tokens, and its image processor with PIL.

    A chat is rendered as its contents in a row, each picture as one placeholder between its two marks.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START_TOKEN, END_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN]})
    tokenizer.chat_template = CHAT_TEMPLATE
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIDE,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (PATCH_SIDE * MERGE) ** 2, "longest_edge": 4 * SIDE**2},
    )
    return PictureProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE)


def architecture(recipe: VisionRecipe) -> Qwen3VLConfig:
    """The family's configuration at the recipe's size."""
    tokenizer = vision_processor().tokenizer
    start, end, image, video = tokenizer.convert_tokens_to_ids([START_TOKEN, END_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN])
    heads = recipe.hidden_size // HEAD_SIZE
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": tokenizer.model_max_length,
        # short waves, as the texts are short; half of the pairs turn with time, a quarter each with height and width
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 30.0,
            "mrope_section": [HEAD_SIZE // 4, HEAD_SIZE // 8, HEAD_SIZE // 8],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 1,
        "deepstack_visual_indexes": [0],
        "hidden_size": recipe.vision_size,
        "intermediate_size": 2 * recipe.vision_size,
        "out_hidden_size": recipe.hidden_size,
        "num_heads": recipe.vision_size // VISION_HEAD_SIZE,
        "num_position_embeddings": (SIDE // PATCH_SIDE) ** 2,
        "patch_size": PATCH_SIDE,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 1,
        "initializer_range": 0.1,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )


def encode_figures(
    processor: PictureProcessor, figures: Sequence[Figure]
) -> tuple[dict[str, Tensor], Int[Tensor, "B T"]]:
    """Turns figures and their right workings into model inputs and labels, -100 where nothing is learnt."""
    tokenizer = processor.tokenizer
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False)
    read: Any = processor
    encoded = read(
        text=[prompt + figure.working + tokenizer.eos_token for figure in figures],
        images=[[figure.draw()] for figure in figures],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    inputs = {key: torch.as_tensor(value) for key, value in encoded.items()}
    ids_BT = inputs["input_ids"]
    # a picture has the same number of placeholders everywhere, so every prompt ends at the same place
    length = len(ids_BT[0]) - max(len(tokenizer(figure.working)["input_ids"]) for figure in figures) - 1
    labels_BT = ids_BT.masked_fill(inputs["attention_mask"] == 0, IGNORED)
    labels_BT[:, :length] = IGNORED
    return inputs, labels_BT


def token_losses(
    model: Qwen3VLForConditionalGeneration, inputs: Mapping[str, Tensor], labels_BT: Int[Tensor, "B T"]
) -> Tensor:
    """The negative log-prob of each labelled token, 0 elsewhere; [B, T - 1]."""
    logits_BTV = model(**inputs).logits[:, :-1]
    loss_N = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="none")
    return loss_N.view(len(labels_BT), -1)


def _build(recipe: VisionRecipe, folder: Path, report: Progress) -> None:
    """Trains a model and saves it with its processor."""
    torch.manual_seed(recipe.seed)
    processor = vision_processor()
    model, facts = _train(recipe, processor, report)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / FACTS_FILE).write_text(json.dumps({"recipe": asdict(recipe), **facts}, indent=2) + "\n")


def _train(
    recipe: VisionRecipe, processor: PictureProcessor, report: Progress
) -> tuple[Qwen3VLForConditionalGeneration, dict[str, float]]:
    """Supervised training until the target; returns the model and what was reached in how many steps."""
    rng, held_out_rng = random.Random(recipe.seed), random.Random(f"validation/{recipe.seed}")
    model = Qwen3VLForConditionalGeneration(architecture(recipe))
    held_out = encode_figures(processor, [draw_figure("validation", held_out_rng) for _ in range(VALIDATION_ROWS)])

    def loss() -> Tensor:
        inputs, labels_BT = encode_figures(processor, [draw_figure("train", rng) for _ in range(recipe.batch_size)])
        return token_losses(model, inputs, labels_BT).sum() / (labels_BT != IGNORED).sum()

    return train_until(
        model,
        [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name],
        recipe,
        loss=loss,
        reached=lambda: token_losses(model, *held_out).sum(1).neg().exp().mean().item(),
        what=f"tiny {recipe.role} for {recipe.task}",
        report=report,
    )
