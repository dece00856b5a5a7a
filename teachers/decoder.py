"""A causal language model taken apart: a state per position, and a head that turns a slice of them into logits.

A vocabulary of 150k ids makes [B, L, V] the largest tensor of a scoring pass by far. Here the model runs up to its last
hidden states, and the head is applied to as few positions at a time as the caller likes.

Shape letters: B rows, L positions of prompt and completion, X state width (hidden width, or the vocabulary where the
model cannot be taken apart), V vocabulary, N positions.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from teachers.errors import TeacherCannot, TeacherMismatch

MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Settings by which a family multiplies its logits: Cohere, Muse, Falcon-H1."""

DIVISOR = "logits_scaling"
"""Setting by which Granite and MiniCPM divide their logits; HyperCLOVA X multiplies by it."""

SOFTCAP = "final_logit_softcapping"
"""Setting c of Gemma's logits: c * tanh(logits / c)."""


@dataclass(frozen=True)
class KeptHead:
    """A head that belongs to nobody's training: a copy, which can be saved.

    Attributes:
      module: the weights.
      scale: by which the logits are multiplied.
      softcap: of the logits; None for none.
      vocab_size: number of real ids; None for all.
      is_earlier: the weights have been trained since, or may be, so that the copy cannot be made again.
    """

    module: nn.Module
    scale: float
    softcap: float | None
    vocab_size: int | None
    is_earlier: bool

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [..., V] at temperature 1 of states [..., X]."""
        return logits_of(states, self.module, self.scale, self.softcap)[..., : self.vocab_size]


class Decoder:
    """A model as `states` and `head`, with `head(states(inputs))` equal to the model's own logits.

    The equality is not taken on trust: the first forward compares both at its last position. A model that computes its
    logits in a way unknown here is then used whole: its states are its logits, and its head changes nothing.
    """

    def __init__(self, model: nn.Module, *, forward_module: nn.Module | None = None, vocab_size: int | None = None):
        """Takes `model` apart without changing it.

        Args:
          model: a causal language model of transformers, possibly a PEFT model.
          forward_module: what is called in its place: the same model as wrapped by DeepSpeed or DDP.
          vocab_size: number of real ids; logits beyond them are cut off before any softmax.
        """
        self.model = model
        self.forward_module = model if forward_module is None else forward_module
        self.vocab_size = vocab_size
        self.is_whole: bool | None = None
        self._kept: nn.Module | None = None
        core: Any = model
        if hasattr(core, "get_base_model"):
            core = core.get_base_model()
        self._backbone = getattr(core, "base_model", None)
        self._lm_head: Any = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
        self.accepts = frozenset(inspect.signature(core.forward).parameters)
        config = core.config.get_text_config()
        self._softcap = getattr(config, SOFTCAP, None)
        self._scale = _logit_scale(config)
        if self._backbone is None or self._backbone is core or not isinstance(self._lm_head, nn.Module):
            self.is_whole = True
        elif self.is_sharded and hasattr(self._lm_head, "base_layer"):
            self.is_whole = True  # an adapter around a sharded head; its parts cannot be gathered one by one

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""
        return next(self.model.parameters()).device

    @property
    def num_ids(self) -> int | None:
        """How many ids the model can read; None where it does not say."""
        model: Any = self.model
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        return getattr(embeddings, "num_embeddings", None)

    @property
    def state_width(self) -> int:
        """X, also before the first forward."""
        if self.is_whole or self._lm_head is None:
            return self.vocab_size or self.num_ids or 1
        return self._lm_head.in_features

    @property
    def is_sharded(self) -> bool:
        """Whether DeepSpeed ZeRO-3 spreads the weights over ranks, which makes every forward a collective call."""
        return any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())

    def states(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "B L X"]:
        """Runs the model on right-padded `inputs`.

        Args:
          inputs: keyword tensors of the model's forward; `input_ids` and `attention_mask` at least.

        Returns:
          The state of each position, from which `head` predicts the next token.
        """
        width = inputs["input_ids"].shape[1]
        if self.is_whole:
            return self._last(self._forward(inputs).logits, width)
        states_BLX, output = self._forward_to_states(inputs)
        if self.is_whole is None:
            self.is_whole = not self._agrees(states_BLX, output.logits, width)
            if self.is_whole:
                return self.states(inputs)
        return self._last(states_BLX, width)

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] at temperature 1 of states [..., X], in float32 (float64 where the states are).

        Under ZeRO-3 a call outside `gathered` is a collective: every rank must make equally many. See `kept_head`.
        """
        if self.is_whole:
            logits = states
        else:
            with self.gathered():
                logits = self._logits(states, self._lm_head)
        return logits if self.vocab_size is None else logits[..., : self.vocab_size]

    def kept_head(self) -> Callable[[Tensor], Tensor]:
        """A `head` that stays as it is now while the model is trained, and whose use is never a collective call.

        A head that is trained, or that ZeRO-3 spreads over ranks, is copied for it; a frozen one only once.
        """
        if self.is_whole or self._lm_head is None:
            return self.head
        # an adapter that is switched off now counts as trained: it may be on when the head is used
        is_adapted = hasattr(self._lm_head, "base_layer") or hasattr(self._lm_head, "original_module")
        trained = is_adapted or any(p.requires_grad for p in self._lm_head.parameters())
        spread = any(hasattr(p, "ds_id") for p in self._lm_head.parameters())
        if not trained and not spread:
            return self.head
        kept = self._kept if self._kept is not None else self._copied_head(spread)
        self._kept = None if trained else kept

        return KeptHead(kept, self._scale, self._softcap, self.vocab_size, is_earlier=trained)

    def _copied_head(self, spread: bool) -> nn.Module:
        with self.gathered():
            if spread:
                weight, has_bias = self._lm_head.weight, self._lm_head.bias is not None
                kept = nn.Linear(weight.shape[1], weight.shape[0], has_bias, weight.device, weight.dtype)
                kept.load_state_dict({name: p.detach() for name, p in self._lm_head.named_parameters()})
            else:
                kept = copy.deepcopy(self._lm_head)
        return kept.requires_grad_(False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Holds the head's weights on this rank; does nothing where they are there anyway."""
        parameters = [] if self.is_whole or self._lm_head is None else list(self._lm_head.parameters(recurse=False))
        missing = [p for p in parameters if hasattr(p, "ds_id") and p.numel() == 0]
        if not missing:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(missing):
            yield

    def _logits(self, states: Tensor, lm_head: Any) -> Tensor:
        return logits_of(states, lm_head, self._scale, self._softcap)

    def _forward(self, inputs: Mapping[str, Tensor], last_only: bool = False) -> Any:
        extra: dict[str, Any] = {"use_cache": False} if "use_cache" in self.accepts else {}
        if last_only and "logits_to_keep" in self.accepts:
            extra["logits_to_keep"] = 1
        return self.forward_module(**inputs, **extra)

    def _forward_to_states(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        # The top module is called, and the states are overheard below it: wrappers (DeepSpeed, DDP, PEFT, autocast)
        # then work as they do in training.
        overheard: list[Any] = []
        assert self._backbone is not None
        handle = self._backbone.register_forward_hook(lambda module, args, output: overheard.append(output))
        try:
            output = self._forward(inputs, last_only=True)
        finally:
            handle.remove()
        if len(overheard) != 1:
            raise TeacherCannot(
                f"one forward of {type(self.model).__name__} ran its backbone {len(overheard)} times; "
                "hand over the model without the wrapper that repeats it"
            )
        backbone = overheard[0]
        return (backbone[0] if isinstance(backbone, tuple) else backbone.last_hidden_state), output

    @staticmethod
    def _last(states: Tensor, width: int) -> Tensor:
        # prompt learning puts virtual tokens in front of the real ones
        if states.shape[1] < width:
            raise TeacherMismatch(f"the model answered for {states.shape[1]} of {width} positions; it cannot be scored")
        return states[:, states.shape[1] - width :]

    def _agrees(self, states_BLX: Tensor, logits: Tensor, width: int) -> bool:
        if states_BLX.shape[1] < width:
            return False
        with self.gathered():
            ours = self._logits(states_BLX[:, -1], self._lm_head)
        theirs = logits[:, -1].to(ours.device)
        if ours.shape != theirs.shape:
            return False
        # scaling or capping that was missed moves the logits by far more than the rounding of the coarser type
        coarse = max(torch.finfo(states_BLX.dtype).eps, torch.finfo(logits.dtype).eps)
        slack = max(1e-4, 4 * coarse) * max(1.0, float(ours.abs().max()))
        return bool((ours - theirs.to(ours.dtype)).abs().max() <= slack)


def logits_of(states: Tensor, lm_head: Any, scale: float, softcap: float | None) -> Tensor:
    """The logits of states, in float32 or finer."""
    weight = lm_head.weight
    states = states.to(weight.device)
    if not weight.is_floating_point():
        logits = lm_head(states)  # a quantised head knows best how to multiply
    elif hasattr(weight, "ds_id"):
        # calling the module would hand the weights back after each slice
        logits = functional.linear(states.to(weight.dtype), weight, lm_head.bias)
    else:
        logits = lm_head(states.to(weight.dtype))
    logits = _at_least_float32(logits)
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _logit_scale(config: Any) -> float:
    for name in MULTIPLIERS:
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    value = getattr(config, DIVISOR, None)
    if value is None:
        return 1.0
    return float(value) if config.model_type == "hyperclovax" else 1.0 / float(value)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
