"""The student's output head, applied to a slice of tokens at a time, forwards and backwards.

The full vocabulary of a whole batch, [B, T, V] in float32, is never held. In the backward pass the logits of each slice
are made again, and their gradient goes straight into those of the hidden states and of the head.

Shape letters: N tokens of a batch (flat), H hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 128
"""Tokens whose logits are held at once on a CPU; at a vocabulary of 151,936 that is 78 MB in float32."""

CHUNK_TOKENS_GPU = 1024
"""The same on a GPU, which smaller products leave idle."""

Measure = Callable[..., dict[str, Tensor]]
"""Logits [N, V] and tensors [N, ...] to measurements [N, ...] by name; `wanted=` names those that will be used."""


@dataclass(frozen=True)
class Head:
    """Hidden states to logits as the model itself makes them.

    Attributes:
      module: the output embedding.
      factor: by which a family multiplies its logits.
      cap: c of a soft cap c * tanh(logits / c); None for none.
    """

    module: Any
    factor: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits."""
        return self.finish(self.module(hidden))

    def finish(self, product: Tensor) -> Tensor:
        """The logits, given the product of hidden states and weights."""
        logits = product if self.factor == 1.0 else product * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @property
    def is_plain(self) -> bool:
        """Whether the module is its weights and nothing else: no adapter, no quantisation."""
        return type(self.module) is nn.Linear


def logit_head(model: Any) -> Head:
    """The head of a causal language model of transformers."""
    config = model.config.get_text_config()
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    factor = next((value for name in names if (value := getattr(config, name, None)) is not None), 1.0)
    if getattr(config, "logits_scaling", None) is not None:
        factor = config.logits_scaling if config.model_type == "hyperclovax" else 1 / config.logits_scaling
    return Head(model.get_output_embeddings(), float(factor), getattr(config, "final_logit_softcapping", None))


def streamed(
    head: Head | Callable[[Tensor], Tensor], hidden_NH: Tensor, parts: Sequence[Tensor], measure: Measure
) -> dict[str, Tensor]:
    """`measure(logits, *parts)` of all tokens, a slice at a time; differentiable in `hidden_NH` and the head.

    Args:
      head: of the student.
      hidden_NH: its last hidden states.
      parts: tensors whose first axis is cut in the same way.
      measure: what is computed of the logits.
    """
    if isinstance(head, Head) and head.is_plain:
        run = _Slices(head, measure, tuple(parts))
        if not torch.is_grad_enabled():
            with gathered(head.module.weight, head.module.bias):
                return run.forward(hidden_NH, head.module.weight, head.module.bias)
        names: list[str] = []
        values = _Streamed.apply(run, names, hidden_NH, head.module.weight, head.module.bias)
        return dict(zip(names, values, strict=True))

    def slice_of(hidden: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        return measure(head(hidden), *rest)

    def apart(*tensors: Tensor) -> dict[str, Tensor]:
        return checkpoint(slice_of, *tensors, use_reentrant=False) if torch.is_grad_enabled() else slice_of(*tensors)

    return _joined([apart(*tensors) for tensors in _cut([hidden_NH, *parts])])


def chunk_tokens(device: torch.device) -> int:
    """Tokens of one slice."""
    return CHUNK_TOKENS_GPU if device.type == "cuda" else CHUNK_TOKENS


@contextmanager
def gathered(*parameters: Any) -> Iterator[None]:
    """Holds these weights whole on this process under DeepSpeed ZeRO-3, a collective call; else does nothing."""
    missing = [p for p in parameters if p is not None and hasattr(p, "ds_id") and p.numel() == 0]
    if not missing:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(missing):
        yield


def _cut(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    size = chunk_tokens(tensors[0].device)
    return list(zip(*(torch.split(tensor, size) for tensor in tensors), strict=True))


def _joined(slices: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in slices]) for name in slices[0]}


@dataclass(frozen=True)
class _Slices:
    """The arithmetic of a pass, apart from autograd."""

    head: Head
    measure: Measure
    parts: tuple[Tensor, ...]

    def forward(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> dict[str, Tensor]:
        return _joined(
            [
                self.measure(self.head.finish(linear(hidden, weight_VH, bias_V)), *rest)
                for hidden, *rest in _cut([hidden_NH, *self.parts])
            ]
        )

    def backward(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, grads: Mapping[str, Tensor], trained: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the hidden states, the weights and the bias; sums over slices are float32."""
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_NH = torch.empty_like(hidden_NH)
        grad_VH = torch.zeros_like(weight_VH, dtype=wide) if trained else None
        grad_V = torch.zeros_like(bias_V, dtype=wide) if trained and bias_V is not None else None
        size, start = chunk_tokens(hidden_NH.device), 0
        for hidden, *rest in _cut([hidden_NH, *self.parts]):
            here = slice(start, start + size)
            product_NV = linear(hidden, weight_VH, bias_V).detach().requires_grad_()
            with torch.enable_grad():
                found = self.measure(self.head.finish(product_NV), *rest, wanted=grads.keys())
                wanted = [name for name in grads if found[name].requires_grad]
                given = [grads[name][here] for name in wanted]
                (pull_NV,) = torch.autograd.grad([found[name] for name in wanted], [product_NV], given)
            del found, product_NV
            grad_NH[here] = (pull_NV @ weight_VH.to(pull_NV.dtype)).to(grad_NH.dtype)
            if grad_VH is not None:
                if pull_NV.dtype == wide:
                    grad_VH.addmm_(pull_NV.T, hidden.to(wide))
                else:
                    grad_VH += pull_NV.T @ hidden.to(pull_NV.dtype)
            if grad_V is not None:
                grad_V += pull_NV.sum(0)
            start += size
        return grad_NH, grad_VH, grad_V


class _Streamed(torch.autograd.Function):
    """`_Slices` with gradients; only hidden states and weights are kept between the passes."""

    @staticmethod
    def forward(ctx: Any, run: _Slices, names: list[str], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.run = run
        ctx.autocast = _autocast_now(hidden.device.type)
        with gathered(weight, bias):
            found = run.forward(hidden, weight, bias)
        names.extend(found)
        ctx.names = tuple(found)
        ctx.mark_non_differentiable(*(value for value in found.values() if not value.is_floating_point()))
        return tuple(found.values())

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        grads = {name: grad for name, grad in zip(ctx.names, given, strict=True) if grad is not None}
        with gathered(weight, bias), ctx.autocast():
            grad_hidden, grad_weight, grad_bias = ctx.run.backward(hidden, weight, bias, grads, ctx.needs_input_grad[3])
            dtype = weight.dtype
        return (
            None,
            None,
            grad_hidden,
            None if grad_weight is None else grad_weight.to(dtype),
            None if grad_bias is None else grad_bias.to(dtype),
        )


def _autocast_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Enters the autocast that is in force now; the backward pass runs outside of it."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype)
