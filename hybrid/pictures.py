"""Rows with pictures: the columns `image` and `images`, in the form that chat templates and processors want."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL.Image import Image
from torch import Tensor

from hybrid.errors import DataError

PICTURE_COLUMNS = ("images", "image")
"""As TRL reads them: a list of pictures, or one."""


def pictures_of(row: Mapping[str, Any]) -> list[Image]:
    """The pictures of a row; none where its column is null or missing."""
    if row.get("images"):
        return list(row["images"])
    return [] if row.get("image") is None else [row["image"]]


def with_pictures(prompt: Sequence[Mapping[str, Any]], pictures: Sequence[Image]) -> list[Mapping[str, Any]]:
    """The chat with a place for each picture before the words of its first user message.

    Raises:
      DataError: nobody speaks as the user, or the places that the messages bring are not as many as the pictures.
    """
    parts = [part for message in prompt if not isinstance(message["content"], str) for part in message["content"]]
    placed = sum(part["type"] == "image" for part in parts)
    users = [i for i, message in enumerate(prompt) if message["role"] == "user" and isinstance(message["content"], str)]
    if placed in (0, len(pictures)) and (placed or not pictures):
        return list(prompt)
    if placed or not users:
        raise DataError(f"a chat has {placed} places for pictures, and its row has {len(pictures)}: {prompt!r:.80}")
    first = prompt[users[0]]
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": first["content"]}]
    return [*prompt[: users[0]], {**first, "content": content}, *prompt[users[0] + 1 :]]


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer itself, or that of a processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def encode_prompts(
    processing_class: Any, rows: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    """The inputs of `generate` for the prompts of some rows, padded on the left; pictures as the model wants them.

    Args:
      processing_class: a tokenizer, or a processor where rows have pictures.
      rows: each with a `prompt`, a text or a chat, and perhaps pictures.
      chat_template_kwargs: variables of the chat template.

    Raises:
      DataError: pictures in a row whose prompt is no chat, or for a student that reads none.
    """
    pictures, texts = [pictures_of(row) for row in rows], []
    for row, own in zip(rows, pictures, strict=True):
        prompt = row["prompt"]
        if own and (isinstance(prompt, str) or not hasattr(processing_class, "image_processor")):
            why = "its prompt is no chat; set data.chat: true" if isinstance(prompt, str) else "the student reads none"
            raise DataError(f"a row has {len(own)} pictures (columns image, images), and {why}")
        if not isinstance(prompt, str):
            prompt = processing_class.apply_chat_template(
                with_pictures(prompt, own), tokenize=False, add_generation_prompt=True, **chat_template_kwargs
            )
        texts.append(prompt)
    images = {"images": pictures} if any(pictures) else {}
    return processing_class(
        text=texts,
        **images,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=isinstance(rows[0]["prompt"], str),
    )
