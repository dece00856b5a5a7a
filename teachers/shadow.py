"""Earlier weights of a model that is being trained, held beside it and put into it while it is asked.

Only weights that are trained are held: a LoRA student costs an adapter, not a second model. Under DeepSpeed ZeRO-3 each
rank holds the shards that it owns; averages and copies are elementwise, so shards need no gathering.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from teachers.errors import TeacherError


class ShadowWeights:
    """A second set of values for the trained weights of `model`, in float32 where the model's are coarser."""

    def __init__(self, model: nn.Module):
        """Copies the current values.

        Raises:
          TeacherError: nothing is trained in the model, a weight has no elements, or FSDP has flattened the weights.
        """
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise TeacherError(
                f"no weight of {type(model).__name__} is trained, so its earlier weights are its present ones; "
                "use a local teacher, or make this teacher before the student is frozen"
            )
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor) or hasattr(parameter, "_is_flat_param"):
                raise TeacherError(
                    f"weight {name!r} is sharded by FSDP; snapshot and EMA teachers work in one process, under DDP and "
                    "under DeepSpeed ZeRO 1, 2 and 3"
                )
            if _held(parameter).numel() == 0 and not hasattr(parameter, "ds_id"):
                raise TeacherError(f"weight {name!r} has no elements; make this teacher from the gathered model")
        self._values = {name: _fine(_held(p)) for name, p in self._parameters.items()}

    @property
    def shard(self) -> tuple[int, int]:
        """Which part of the weights this is: (rank, number of ranks) under ZeRO-3, else (0, 1)."""
        if not any(hasattr(parameter, "ds_id") for parameter in self._parameters.values()):
            return (0, 1)
        return (torch.distributed.get_rank(), torch.distributed.get_world_size())

    def copy(self) -> None:
        """Takes the model's present values."""
        self.average(0.0)

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Moves towards the model: shadow = decay * shadow + (1 - decay) * model."""
        for name, value in self._values.items():
            present = _held(self._parameters[name]).to(device=value.device, dtype=value.dtype)
            value.copy_(present) if decay == 0 else value.lerp_(present, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model compute with the shadow's values, and gives it its own back, the very same tensors."""
        own = {name: self._swap_in(name) for name in self._values}
        try:
            yield
        finally:
            for name, tensor in own.items():
                self._swap_out(name, tensor)

    def state_dict(self) -> dict[str, Tensor]:
        """The values by name; under ZeRO-3 this rank's shards."""
        return {name: value.detach().cpu().clone() for name, value in self._values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes values that `state_dict` gave.

        Raises:
          TeacherError: names, or the size of one, differ from the model's.
        """
        if set(state) != set(self._values):
            other = sorted(set(state) ^ set(self._values))[0]
            raise TeacherError(
                f"the saved teacher has {len(state)} weights and this model trains {len(self._values)}; "
                f"{other!r} is in only one of them. Resume with the model and adapters of the first start"
            )
        for name, value in self._values.items():
            if state[name].shape != value.shape:
                raise TeacherError(
                    f"weight {name!r} of the saved teacher has shape {tuple(state[name].shape)}, here it is "
                    f"{tuple(value.shape)}; resume with the same model on the same number of processes"
                )
        for name, value in self._values.items():
            value.copy_(state[name].to(device=value.device, dtype=value.dtype))

    def _swap_in(self, name: str) -> Tensor:
        parameter: Any = self._parameters[name]
        if hasattr(parameter, "ds_id"):
            # The shard is a view into DeepSpeed's flat buffer, so its content is exchanged, not the tensor. A full copy
            # that DeepSpeed keeps of a small weight is released first, or the forward would read it.
            _release(parameter)
            own = parameter.ds_tensor.clone()
            parameter.ds_tensor.copy_(self._values[name])
            return own
        own = parameter.data
        parameter.data = self._values[name].to(device=own.device, dtype=own.dtype)
        return own

    def _swap_out(self, name: str, own: Tensor) -> None:
        parameter: Any = self._parameters[name]
        if hasattr(parameter, "ds_id"):
            _release(parameter)
            parameter.ds_tensor.copy_(own)
        else:
            parameter.data = own


def _held(parameter: Any) -> Tensor:
    """What this rank holds of a weight: its shard under ZeRO-3, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.data


def _fine(value: Tensor) -> Tensor:
    # an average in bfloat16 stands still: 0.001 of a difference is lost in 8 bits
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


def _release(parameter: Any) -> None:
    if parameter.numel() and parameter.ds_tensor.numel() != parameter.numel():
        parameter.partition()
