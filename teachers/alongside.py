"""A model of this process that reads along while responses are written: one forward of one token per token.

Shape letters: R rows, L positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from teachers.pixels import ImageInputs
from teachers.protocol import Row
from teachers.scoring import evaluating


class Alongside:
    """Next-token logits after a prompt, and after each token that is told; keeps its own key-value cache.

    Prompts are padded on the left, so that all rows grow at the same place.
    """

    def __init__(self, model: nn.Module, *, images: ImageInputs | None = None, vocab_size: int | None = None):
        """Binds a model; nothing is computed yet.

        Args:
          model: a causal language model of transformers.
          images: turns the rows' pictures into tensors; None for a model of text.
          vocab_size: real ids; logits beyond them are cut off.
        """
        self.model: Any = model
        self._images = images
        self._vocab_size = vocab_size
        self._cache: Any = None
        self._mask_RL: Tensor | None = None
        self._offset_R1: Tensor | None = None

    @torch.no_grad()
    def begin(self, rows: Sequence[Row]) -> Float[Tensor, "R V"]:
        """Reads the prompts, each with its pictures; what completions there are is not looked at.

        Returns:
          Logits of each row's first token, at temperature 1.

        Raises:
          TeacherMismatch: pictures and placeholders of a prompt differ in number.
        """
        device = next(self.model.parameters()).device
        width = max(len(row.prompt_ids) for row in rows)
        ids_RL = torch.tensor([[*[0] * (width - len(row.prompt_ids)), *row.prompt_ids] for row in rows], device=device)
        self._mask_RL = torch.tensor(
            [[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows], device=device
        )
        inputs: dict[str, Tensor] = {}
        if self._images is not None:
            inputs = self._images.inputs(rows, ids_RL, frozenset({"mm_token_type_ids"}))
        if not inputs:
            inputs["position_ids"] = (self._mask_RL.cumsum(1) - 1).clamp(min=0)
        from transformers import DynamicCache

        self._cache, self._offset_R1 = DynamicCache(config=self.model.config.get_text_config()), None
        logits_RV = self._forward(ids_RL, inputs)
        if "pixel_values" in inputs:
            # pictures take fewer positions than tokens; the model has just counted how many fewer
            self._offset_R1 = getattr(self.model.base_model, "rope_deltas", None)
        return logits_RV

    @torch.no_grad()
    def follow(self, token_R: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Reads one more token of each row, and answers with the logits of the next."""
        assert self._mask_RL is not None, "begin() comes first"
        token_R1 = token_R.to(self._mask_RL.device)[:, None]
        position_R1 = self._mask_RL.sum(1, keepdim=True)
        self._mask_RL = torch.cat([self._mask_RL, torch.ones_like(token_R1)], 1)
        if self._offset_R1 is None:
            return self._forward(token_R1, {"position_ids": position_R1})
        return self._forward(token_R1, {"position_ids": (position_R1 + self._offset_R1).expand(3, -1, -1)})

    def _forward(self, ids_RL: Tensor, inputs: dict[str, Tensor]) -> Float[Tensor, "R V"]:
        assert self._mask_RL is not None
        with evaluating(self.model):
            output = self.model(
                input_ids=ids_RL,
                attention_mask=self._mask_RL,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
                **inputs,
            )
        return output.logits[:, -1, : self._vocab_size].float()
