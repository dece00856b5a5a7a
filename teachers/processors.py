"""The processor of a model that reads pictures, with nothing but PIL.

The Qwen-VL processors of transformers also prepare videos, for which they need torchvision, and cannot be made without
it. `PictureProcessor` does the same for text and pictures alone, from the same folder.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, ProcessorMixin

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families that read pictures as `pixel_values` and `image_grid_thw`, merged patch by patch."""

IMAGE_TOKEN = "<|image_pad|>"


class PictureProcessor(ProcessorMixin):
    """Expands each placeholder of a text to as many as its picture has merged patches, and makes the tensors."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        """Takes its parts.

        Args:
          image_processor: answers with `pixel_values` and `image_grid_thw`; has a `merge_size`.
          tokenizer: knows `IMAGE_TOKEN`.
          chat_template: Jinja text that writes one `IMAGE_TOKEN` per picture.
        """
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **others: Any) -> Any:
        """Also takes pictures row by row, with None for a row that has none; called by transformers."""
        if isinstance(images, list | tuple):
            rows = [row if isinstance(row, list | tuple) else [] if row is None else [row] for row in images]
            images = [picture for row in rows for picture in row] or None
        return super().prepare_inputs_layout(images=images, text=text, **others)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        """The placeholders of one picture; called by transformers."""
        num_patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return IMAGE_TOKEN * (num_patches // self.image_processor.merge_size**2)

    @property
    def model_input_names(self) -> list[str]:
        """Of the tensors that a call makes."""
        return [*super().model_input_names, "mm_token_type_ids"]


def load_processor(path: str | Path, *, padding_side: str = "left") -> Any:
    """The processor of an image-text model.

    Args:
      path: a folder, or a name on the hub.
      padding_side: of its tokenizer; generation wants the left.

    Raises:
      OSError: there is none.
    """
    family = model_config(path).model_type
    if family in QWEN_VL:
        return PictureProcessor.from_pretrained(path, backend="pil", padding_side=padding_side)
    return AutoProcessor.from_pretrained(path, padding_side=padding_side)


def model_config(path: str | Path) -> Any:
    """The configuration of a folder's or hub name's model; of a LoRA adapter's folder, that of the model below it.

    Raises:
      OSError: there is no model.
    """
    folder = Path(path)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        path = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return AutoConfig.from_pretrained(path)


def reads_images(path: str | Path) -> bool:
    """Whether the model of a folder or hub name takes pictures.

    Raises:
      OSError: there is no model.
    """
    return getattr(model_config(path), "vision_config", None) is not None
