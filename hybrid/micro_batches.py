"""Micro-batches by a budget of padded tokens: pieces (`hybrid.cutting`) are trimmed, trained on, and added up again.

Everything that a step's loss is made of adds up over its rows: the objective's terms by their shares, TRL's surrogate
by `loss_share`, logged means by the tokens behind them. So pieces of any size give the loss, the gradient and the
metrics of the whole, and only memory and time differ.

Shape letters: R rows of a piece, S segments (see `hybrid.cutting`).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from hybrid.cutting import Piece, cut_rows, lengths_of, placed
from hybrid.errors import ConfigError
from hybrid.generation import IMAGE_KEYS, PER_IMAGE_KEYS, Generation, image_inputs

TILED_KEYS = ("num_tiles", "spatial_shapes", "image_position_ids")
"""Tensors of picture families whose rows cannot be told apart here."""

_log = logging.getLogger(__name__)


def take(inputs: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """The rows of a piece out of TRL's batch, without the padding that they do not need; pictures by their numbers."""
    rows, numbers = piece.rows_R, piece.rows_R.tolist()
    first, width = inputs["prompt_ids"].shape[1] - piece.prompt, inputs["completion_ids"].shape[1]
    taken: dict[str, Any] = {}
    for key, value in inputs.items():
        if key in IMAGE_KEYS or value is None:
            continue
        if isinstance(value, list):
            taken[key] = [value[row] for row in numbers]
        elif not isinstance(value, Tensor) or value.dim() == 0:
            taken[key] = value
        elif key in ("prompt_ids", "prompt_mask"):
            taken[key] = value[rows, first:]
        elif value.dim() > 1 and value.shape[1] == width:
            taken[key] = value[rows, : piece.completion]
        else:
            taken[key] = value[rows]
    images = image_inputs(inputs, rows)
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in images:
            images[key] = images[key][:, first : inputs["prompt_ids"].shape[1] + piece.completion]
    if not any(inputs.get("num_images") or ()) or any(taken["num_images"]):
        return taken | images
    return {key: value for key, value in (taken | images).items() if key not in (*PER_IMAGE_KEYS, "num_images")}


def tiled(inputs: Mapping[str, Any]) -> list[str]:
    """Names of tensors of pictures that are stored in tiles."""
    return [key for key in TILED_KEYS if inputs.get(key) is not None]


def refuse_tiles(inputs: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for pictures that are stored in tiles."""
    if found := tiled(inputs):
        raise ConfigError(
            f"max_tokens_per_micro_batch cannot cut pictures that are stored with {found[0]}; leave it out, and set "
            "train.micro_batch (per_device_train_batch_size) instead"
        )


# --- how pieces add up -----------------------------------------------------------------------------------------------

ADDS_UP = frozenset({"dapo", "cispo", "vespo"})
"""TRL's loss types that divide by a count of the whole generation batch."""


def loss_share(loss_type: str, mask_RT: Tensor, mask_BT: Tensor) -> float:
    """The weight of a piece in TRL's loss, which for some loss types is a mean over its rows or tokens."""
    if loss_type in ADDS_UP:
        return 1.0
    if loss_type == "bnpo":
        return float(mask_RT.sum()) / max(1.0, float(mask_BT.sum()))
    return len(mask_RT) / len(mask_BT)


def counts_rows(name: str, *, by_sequence: bool) -> bool:
    """Whether a logged mean is one over responses, where others are over tokens.

    Args:
      name: as TRL logs it.
      by_sequence: whether TRL's ratios are those of whole responses.
    """
    return name == "vespo/phi_seq_mean" or (by_sequence and "clip" in name)


class Alone:
    """An accelerator whose collective calls see this process alone.

    TRL gathers a number of each row for its logs, and the pieces of two processes have not as many rows.
    """

    def __init__(self, accelerator: Any) -> None:
        """Takes the accelerator that answers everything else."""
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        """What is not collective."""
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor of this process."""
        return tensor

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The tensor of this process."""
        return tensor


def check_settings(trainer: Any) -> None:
    """Refuses what does not add up over the pieces of a step.

    Raises:
      ConfigError: names the setting.
    """
    args = trainer.args
    if args.max_tokens_per_micro_batch < 1:
        raise ConfigError(f"max_tokens_per_micro_batch must be at least 1; got {args.max_tokens_per_micro_batch}")
    of_a_forward = {
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "router_aux_loss_coef": trainer.aux_loss_enabled,
    }
    wanted = [name for name, is_set in of_a_forward.items() if is_set]
    if wanted:
        raise ConfigError(
            f"{wanted[0]} is taken over the rows of one forward, which max_tokens_per_micro_batch cuts; leave one out"
        )
    spread = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if spread and trainer.accelerator.num_processes > 1 and hasattr(trainer.processing_class, "image_processor"):
        raise ConfigError(
            "max_tokens_per_micro_batch may leave a process with a micro-batch without pictures, where the others wait "
            "for its share of the vision weights; for a student that reads pictures leave it out, or use DDP"
        )


class MicroBatches:
    """Cuts the batches of one trainer, the same number of times on every process that must keep step."""

    def __init__(self, trainer: Any) -> None:
        """Takes a trainer with a budget of padded tokens.

        Raises:
          ConfigError: the trainer's settings do not add up over pieces.
        """
        check_settings(trainer)
        self.trainer = trainer
        self.budget = int(trainer.args.max_tokens_per_micro_batch)
        self._has_said = False

    @property
    def is_collective(self) -> bool:
        """Whether processes must run as many forwards as each other, even without gradients."""
        plugin = getattr(self.trainer.accelerator.state, "deepspeed_plugin", None)
        return self.trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)

    def pieces(self, inputs: Mapping[str, Any], *texts_BU: Tensor, together: bool) -> list[Piece]:
        """The pieces of a batch, longest rows first and rows with pictures last.

        Args:
          inputs: TRL's batch.
          texts_BU: masks of texts that follow the prompt in a forward of their own.
          together: whether every process makes this call and runs as many pieces.

        Raises:
          ConfigError: pictures that are stored in tiles.
        """
        refuse_tiles(inputs)
        prompt_BP, mask_BT = inputs["prompt_mask"], inputs["completion_mask"]
        segments = [prompt_BP, mask_BT, *(mask for text_BU in texts_BU for mask in (prompt_BP, text_BU))]
        lengths_BS = lengths_of(*segments, multiple=self.trainer.pad_to_multiple_of or 1)
        self._say(int(lengths_BS.sum(1).max()))
        cuts = cut_rows(lengths_BS, self.budget)
        if together:
            most = torch.tensor([len(cuts)], device=mask_BT.device)
            cuts = cut_rows(lengths_BS, self.budget, int(self.trainer.accelerator.gather(most).max()))
        num_images = inputs.get("num_images")
        if num_images is not None:
            # DDP waits in the last backward for the gradients of every weight that was used
            cuts.sort(key=lambda rows: any(num_images[row] for row in rows))
        return [
            Piece(
                torch.tensor(rows, device=mask_BT.device),
                min(int(lengths_BS[rows, 0].max()), prompt_BP.shape[1]),
                min(int(lengths_BS[rows, 1].max()), mask_BT.shape[1]),
            )
            for rows in cuts
        ]

    def _say(self, longest: int) -> None:
        if longest > self.budget and not self._has_said:
            self._has_said = True
            _log.warning(
                "a response with its prompt has %d tokens, more than max_tokens_per_micro_batch = %d: such rows go "
                "alone, and take the memory that they take",
                longest,
                self.budget,
            )

    def loss(self, model: Any, inputs: Mapping[str, Any], generation: Generation) -> Tensor:
        """The loss of a batch, piece after piece; in training all but the last have gone backward already.

        Args:
          model: the (wrapped) student.
          inputs: TRL's batch.
          generation: the generation batch that it was taken from.
        """
        trainer, mode = self.trainer, "train" if self.trainer.model.training else "eval"
        texts = generation.batch.demonstration
        texts_BU = [] if texts is None else [texts.mask_BU[inputs["hybrid_row"]]]
        pieces = self.pieces(inputs, *texts_BU, together=trainer.accelerator.num_processes > 1)
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        counts, noted, total = [], [], torch.zeros((), device=mask_BT.device)
        logged, accelerator = trainer._metrics[mode], trainer.accelerator
        for place, piece in enumerate(pieces):
            part, is_last = take(inputs, piece), place == len(pieces) - 1
            mask_RT = part["completion_mask"] * part.get("tool_mask", 1)
            counts.append([float(mask_RT.sum()), float(len(mask_RT))])
            part["hybrid_share"] = loss_share(trainer.loss_type, mask_RT, mask_BT)
            noted.append(defaultdict(list))
            with nullcontext() if is_last else unsynced(accelerator, model):
                trainer._metrics[mode], trainer.accelerator = noted[-1], Alone(accelerator)
                try:
                    loss = trainer._compute_loss(model, part)
                finally:
                    trainer._metrics[mode], trainer.accelerator = logged, accelerator
                if mode == "train" and not is_last:
                    accelerator.backward(loss, **self._scaling())
                    loss = loss.detach()
            total = total + loss
        self._log(logged, noted, counts)
        positions = sum(len(p.rows_R) * (p.prompt + p.completion) for p in pieces)
        used = int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
        logged["micro_batches/number"].append(float(len(pieces)))
        logged["micro_batches/padding"].append(1 - used / positions)
        return total

    def _scaling(self) -> dict[str, bool]:
        # as transformers' `training_step` does for the last piece
        return {"scale_wrt_gas": False} if self.trainer.is_deepspeed_enabled else {}

    def _log(self, logged: Any, noted: Sequence[Mapping[str, list[float]]], counts: Sequence[Sequence[float]]) -> None:
        """Writes down what the pieces of all processes noted, as the whole would have.

        Args:
          logged: where to.
          noted: by each piece of this process.
          counts: tokens and rows of each piece.
        """
        accelerator = self.trainer.accelerator
        by_sequence = self.trainer.importance_sampling_level == "sequence"
        sums: dict[str, list[float]] = {}
        ends: dict[str, float] = {}
        for name in noted[0]:
            values = [part[name][-1] for part in noted]
            if name.endswith(("_min", "_max")):
                sign = 1 if name.endswith("_max") else -1
                ends[name] = max((sign * value for value in values if not math.isnan(value)), default=-math.inf)
            elif name.startswith("loss/"):
                sums[name] = [math.fsum(values), 0.0]
            else:
                weights = [count[counts_rows(name, by_sequence=by_sequence)] for count in counts]
                sums[name] = [math.fsum(v * w for v, w in zip(values, weights, strict=True)), math.fsum(weights)]
        device = accelerator.device
        total = accelerator.reduce(
            torch.tensor(list(sums.values()), device=device, dtype=torch.float64), reduction="sum"
        )
        for name, (value, weight) in zip(sums, total.tolist(), strict=True):
            logged[name].append(value / max(1.0, weight))
        most = accelerator.gather(torch.tensor([list(ends.values())], device=device)).amax(0)
        for name, value in zip(ends, most.tolist(), strict=True):
            sign = 1 if name.endswith("_max") else -1
            logged[name].append(math.nan if math.isinf(value) else sign * value)


def halves(ids: Tensor, attention: Tensor, width: int) -> dict[str, Tensor]:
    """Prompts, padded on the left, and completions of `width`, padded on the right, as TRL's batch names them."""
    return {
        "prompt_ids": ids[:, :-width],
        "prompt_mask": attention[:, :-width],
        "completion_ids": ids[:, -width:],
        "completion_mask": attention[:, -width:],
    }


def logps_of(
    pieces: Sequence[Piece],
    forward: Callable[..., Any],
    ids: Tensor,
    attention: Tensor,
    width: int,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None, None]:
    """Log-probs and entropies of the last `width` positions, piece by piece and without gradients.

    Args:
      pieces: of the rows.
      forward: of some rows, with the arguments of TRL's `_get_per_token_logps_and_entropies`.
      ids: prompts and completions.
      attention: their mask.
      width: of the completions.
      options: all other arguments of `forward`.
    """
    inputs, parts = halves(ids, attention, width), []
    for piece in pieces:
        part = take({**inputs, **options, "batch_size": None}, piece)
        rows, mask = (
            torch.cat([part.pop(f"prompt_{name}"), part.pop(f"completion_{name}")], 1) for name in ("ids", "mask")
        )
        parts.append(forward(rows, mask, piece.completion, **part))
    logprob_BT = placed([part[0] for part in parts], pieces, inputs["completion_mask"])
    if parts[0][1] is None:
        return logprob_BT, None, None
    return logprob_BT, placed([part[1] for part in parts], pieces, inputs["completion_mask"]), None


@contextmanager
def unsynced(accelerator: Any, model: Any) -> Iterator[None]:
    """A forward and backward whose gradients wait, on this process and in this update, for a later piece."""
    state, before = accelerator.gradient_state, accelerator.sync_gradients
    state._set_sync_gradients(False)
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    try:
        with nullcontext() if is_deepspeed else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)
