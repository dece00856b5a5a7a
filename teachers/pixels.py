"""Pictures of a row as the tensors that a Qwen-VL-type model reads.

Such a model finds its pictures by placeholder tokens that are already in the prompt, as many as its vision tower makes
of the picture; this file makes the tensors and holds both to one another.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from teachers.errors import TeacherCannot, TeacherMismatch
from teachers.protocol import Row


class ImageInputs:
    """Turns the pictures of a batch into `pixel_values`, `image_grid_thw` and, where asked for, token types."""

    def __init__(self, image_processor: Callable[..., Any], image_token_id: int):
        """Takes the parts of a processor that are needed.

        Args:
          image_processor: called with `images=[...]` and `return_tensors="pt"`; answers with `pixel_values` (patches of
            all pictures, one after the other) and `image_grid_thw` (patches per picture along time, height and width).
          image_token_id: the placeholder id.
        """
        self._image_processor = image_processor
        self.image_token_id = image_token_id
        self._merged = int(getattr(image_processor, "merge_size", 1)) ** 2

    @classmethod
    def of(cls, processor: Any, model: Any) -> "ImageInputs":
        """Takes them from a processor of transformers and, for the placeholder id, from the model's config.

        Raises:
          TeacherCannot: the processor has no image processor, or neither knows the placeholder.
        """
        image_processor = getattr(processor, "image_processor", None)
        if image_processor is None:
            raise TeacherCannot(f"{type(processor).__name__} has no image_processor; it cannot prepare images")
        token = getattr(processor, "image_token_id", None)
        token = getattr(model.config, "image_token_id", None) if token is None else token
        if token is None:
            raise TeacherCannot(
                f"neither {type(processor).__name__} nor {type(model).__name__} says image_token_id; "
                "images are supported for models that take pixel_values and image_grid_thw"
            )
        return cls(image_processor, int(token))

    def inputs(self, rows: Sequence[Row], input_ids: Tensor, accepts: Set[str]) -> dict[str, Tensor]:
        """Makes the image tensors of a batch.

        Args:
          rows: the batch, in the order of `input_ids`.
          input_ids: ids of shape [R, L], padded.
          accepts: names of the arguments that the model's forward takes.

        Returns:
          Keyword tensors; nothing where no row has a picture.

        Raises:
          TeacherMismatch: a row's prompt has another number of placeholders than its pictures need.
          TeacherCannot: the processor's answer has another form.
        """
        pictures = [image for row in rows for image in row.images]
        if not pictures:
            for i, row in enumerate(rows):
                self._compare(i, row, 0)
            return {}
        made = self._image_processor(images=pictures, return_tensors="pt")
        if "pixel_values" not in made or "image_grid_thw" not in made:
            raise TeacherCannot(
                f"{type(self._image_processor).__name__} answers with {sorted(made)}; images are supported for models "
                "that take pixel_values and image_grid_thw"
            )
        grid = made["image_grid_thw"]
        tokens_per_picture = (grid.prod(-1) // self._merged).tolist()
        first = 0
        for i, row in enumerate(rows):
            self._compare(i, row, sum(tokens_per_picture[first : first + len(row.images)]))
            first += len(row.images)
        inputs = {
            "pixel_values": made["pixel_values"].to(input_ids.device),
            "image_grid_thw": grid.to(input_ids.device),
        }
        if "mm_token_type_ids" in accepts:
            inputs["mm_token_type_ids"] = (input_ids == self.image_token_id).to(torch.int32)
        return inputs

    def _compare(self, i: int, row: Row, num_needed: int) -> None:
        num_given = row.prompt_ids.count(self.image_token_id)
        if num_given != num_needed:
            raise TeacherMismatch(
                f"a prompt of {len(row.prompt_ids)} tokens (row {i} of its batch) has {num_given} image placeholders "
                f"(id {self.image_token_id}), and its {len(row.images)} images need {num_needed}; build the prompt and "
                "the teacher with the same processor, at the same image size"
            )
