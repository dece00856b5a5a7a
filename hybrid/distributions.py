"""The student's next-token distributions against a teacher's, a slice of tokens at a time.

Logits are made for a slice of tokens at a time (`hybrid.heads`), so [B, T, V] is never held.

`add_distribution_head` patches a model's forward as TRL's fused head does, so that the pass runs inside the wrapped
module (DDP, DeepSpeed) and no second forward is needed: `model(..., distribution=Request(...))` returns a dictionary.
"""

import functools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hybrid.errors import ConfigError
from hybrid.heads import Head, logit_head, streamed
from hybrid.objective.divergence import divergence, kl, with_tail
from hybrid.objective.losses import Divergence, Support

TeacherHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a distribution pass shall measure at the last T positions.

    Attributes:
      target_BT: the sampled ids.
      mask_BT: True where a token counts; nothing is computed elsewhere.
      temperature: of the sampler, at which log-probs and entropies are taken.
      divergences: which divergences, each at its own temperature.
      teacher_hidden_BTH: the teacher's hidden states, and
      teacher_head: what makes logits of them; both for full-support divergences.
      support_ids_BTK: ids of a top-k support (-1 is padding), and
      support_logprob_BTK: the teacher's log-probs there.
      num_top: how many most likely ids to return; 0 for none.
      top_of: whose these are; those of a teacher need its hidden states, and the union has up to twice as many.
      vocab_size: real tokens that both vocabularies share; None for all.
    """

    target_BT: Int[Tensor, "B T"]
    mask_BT: Bool[Tensor, "B T"]
    temperature: float = 1.0
    divergences: tuple[Divergence, ...] = ()
    teacher_hidden_BTH: Float[Tensor, "B T H"] | None = None
    teacher_head: TeacherHead | None = None
    support_ids_BTK: Int[Tensor, "B T K"] | None = None
    support_logprob_BTK: Float[Tensor, "B T K"] | None = None
    num_top: int = 0
    top_of: Support = "student"
    vocab_size: int | None = None


def add_distribution_head(model: nn.Module) -> None:
    """Lets `model(..., distribution=Request(...))` return measurements instead of logits.

    Args:
      model: a causal language model with `base_model` and an output embedding; not the wrapper around it.
    """
    inner_forward: Any = model.forward

    @functools.wraps(inner_forward)
    def forward(*args: Any, distribution: Request | None = None, **kwargs: Any) -> Any:
        if distribution is None:
            return inner_forward(*args, **kwargs)
        kwargs.pop("labels", None)
        base: Any = model.base_model
        hidden_BLH = base(*args, **kwargs, use_cache=False).last_hidden_state
        num_kept = distribution.target_BT.shape[1]
        return measure(hidden_BLH[:, -num_kept - 1 : -1], logit_head(model), distribution)

    model.forward = forward


def measure(hidden_BTH: Float[Tensor, "B T H"], head: Head | TeacherHead, request: Request) -> dict[str, Tensor]:
    """Measures the requested quantities; differentiable with respect to `hidden_BTH` and the head.

    Returns:
      "logprobs" and "entropies" [B, T]; "divergence/i" [B, T] for each divergence; "support_logprobs" [B, T, K] of
      the student on the support; "top_ids", "top_logprobs" and, with a full teacher, "teacher_top_logprobs"
      [B, T, num_top].
      All are 0 (ids -1, top log-probs -inf) where the mask is False.
    """
    mask_BT = request.mask_BT
    parts = [x[mask_BT] for x in (request.target_BT, *_rows_of(request))]
    whole = streamed(head, hidden_BTH[mask_BT], parts, partial(_measure_chunk, request))
    return {key: _scatter(value_N, mask_BT, _FILL.get(key, 0.0)) for key, value_N in whole.items()}


_FILL = {"top_ids": -1, "top_logprobs": -torch.inf, "teacher_top_logprobs": -torch.inf}


def _rows_of(request: Request) -> Sequence[Tensor]:
    optional = (request.teacher_hidden_BTH, request.support_ids_BTK, request.support_logprob_BTK)
    return [x for x in optional if x is not None]


def _scatter(value_N: Tensor, mask_BT: Tensor, fill: float) -> Tensor:
    out = value_N.new_full((*mask_BT.shape, *value_N.shape[1:]), fill)
    return out.masked_scatter(mask_BT.view(*mask_BT.shape, *(1,) * (value_N.dim() - 1)).expand_as(out), value_N)


def _measure_chunk(
    request: Request, logits_NV: Tensor, target_N: Tensor, *rest: Tensor, wanted: Set[str] | None = None
) -> dict[str, Tensor]:
    """The measurements of some tokens; only the `wanted` ones where a backward pass asks for some."""
    extra = list(rest)
    teacher_hidden_NH = extra.pop(0) if request.teacher_hidden_BTH is not None else None
    support_ids_NK = extra.pop(0) if request.support_ids_BTK is not None else None
    support_log_NK = extra.pop(0) if request.support_logprob_BTK is not None else None
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    log_NV = shared_log_softmax(logits_NV, request.temperature, None)
    out = {"logprobs": log_NV.gather(-1, target_N[:, None]).squeeze(-1)}
    if wanted is None or "entropies" in wanted:
        out["entropies"] = -(log_NV.exp() * log_NV).sum(-1)
    if support_ids_NK is not None:
        gathered_NK = log_NV.gather(-1, support_ids_NK.clamp(min=0))
        out["support_logprobs"] = gathered_NK.masked_fill(support_ids_NK < 0, 0)
    for index, which in enumerate(request.divergences):
        name = f"divergence/{index}"
        if wanted is not None and name not in wanted:
            continue
        teacher_NV, width = None, request.vocab_size
        if which.support == "full":
            assert teacher_hidden_NH is not None
            assert request.teacher_head is not None
            teacher_NV = request.teacher_head(teacher_hidden_NH).float()
            width = min(width or logits_NV.shape[-1], logits_NV.shape[-1], teacher_NV.shape[-1])
            teacher_NV = shared_log_softmax(teacher_NV, which.temperature, width)
        is_whole = width is None or width >= logits_NV.shape[-1]
        same = is_whole and which.temperature == request.temperature
        student_NV = log_NV if same else shared_log_softmax(logits_NV, which.temperature, width)
        if teacher_NV is not None:
            out[name] = divergence(student_NV, teacher_NV, which.kind, which.beta)
        else:
            assert support_ids_NK is not None
            assert support_log_NK is not None
            student_NS = on_support(student_NV, support_ids_NK)
            out[name] = divergence(student_NS, with_tail(support_log_NK), which.kind, which.beta)
    if request.num_top and (wanted is None or not wanted.isdisjoint(_FILL)):
        teacher_NV = None
        if teacher_hidden_NH is not None and request.teacher_head is not None:
            teacher_NV = shared_log_softmax(request.teacher_head(teacher_hidden_NH).float(), request.temperature, None)
        out["top_ids"] = support_ids(log_NV, teacher_NV, request.num_top, request.top_of)
        out["top_logprobs"] = on_ids(log_NV, out["top_ids"])
        if teacher_NV is not None:
            out["teacher_top_logprobs"] = on_ids(teacher_NV, out["top_ids"])
    return out


def support_ids(
    student_NV: Float[Tensor, "N V"], teacher_NV: Float[Tensor, "N W"] | None, num_top: int, top_of: Support
) -> Int[Tensor, "N K"]:
    """The most likely ids of the student, the teacher or both; those of both that are twice there are -1 once.

    Args:
      student_NV: log-probs or logits.
      teacher_NV: likewise; None where only the student's are asked for.
      num_top: how many of each.
      top_of: whose.

    Raises:
      ConfigError: the teacher's are asked for, and its distribution is not there.
    """
    own_NK = student_NV.topk(min(num_top, student_NV.shape[-1]), -1).indices
    if top_of == "student":
        return own_NK
    if teacher_NV is None:
        raise ConfigError(
            f"support: {top_of} needs the teacher's whole distribution, which only a teacher of this process gives; "
            "use support: student, or a local teacher"
        )
    theirs_NK = teacher_NV.topk(min(num_top, teacher_NV.shape[-1]), -1).indices
    if top_of == "teacher":
        return theirs_NK
    twice_NK = (theirs_NK[:, :, None] == own_NK[:, None, :]).any(-1)
    return torch.cat([own_NK, theirs_NK.masked_fill(twice_NK, -1)], -1)


def on_ids(log_NV: Float[Tensor, "N V"], ids_NK: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Log-probs of ids; -inf where the id is -1."""
    return log_NV.gather(-1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, -torch.inf)


def shared_log_softmax(logits: Float[Tensor, "*s V"], temperature: float, width: int | None) -> Float[Tensor, "*s W"]:
    """Log-softmax at a temperature over the first `width` tokens: a padded vocabulary's extra rows are no tokens."""
    shared = logits[..., :width]
    return torch.log_softmax(shared if temperature == 1 else shared / temperature, -1)


def on_support(log_NV: Float[Tensor, "N V"], ids_NK: Int[Tensor, "N K"]) -> Float[Tensor, "N K1"]:
    """Log-probs of a support (-inf for padding ids) and, exactly, of everything outside it."""
    inside_NK = torch.where(ids_NK < 0, ids_NK[:, :1], ids_NK).clamp(min=0)
    # The floor is that of `with_tail`: a support that holds everything leaves both sides the same empty tail.
    floor = math.log(torch.finfo(log_NV.dtype).eps)
    outside_NV = log_NV.scatter(-1, inside_NK, 2 * floor)
    tail_N1 = outside_NV.logsumexp(-1, keepdim=True).clamp(min=floor)
    top_NK = log_NV.gather(-1, inside_NK).masked_fill(ids_NK < 0, -torch.inf)
    return torch.cat([top_NK, tail_N1], -1)


def reverse_kl_of_logits(
    student_NV: Float[Tensor, "N V"], teacher_NV: Float[Tensor, "N W"], wanted: Divergence, temperature: float
) -> Float[Tensor, " N"]:
    """The reverse KL that is measured for credit, from both models' logits at temperature 1.

    Args:
      student_NV: of the student.
      teacher_NV: of the teacher, whose vocabulary may be padded otherwise.
      wanted: with any support.
      temperature: of the sampler, at which a top-k support is compared.
    """
    if wanted.support == "full":
        width = min(student_NV.shape[1], teacher_NV.shape[1])
        ours_NV, theirs_NV = (
            shared_log_softmax(x.float(), wanted.temperature, width) for x in (student_NV, teacher_NV)
        )
        return divergence(ours_NV, theirs_NV, "reverse_kl", wanted.beta)
    ours_NV, theirs_NV = (torch.log_softmax(x.float() / temperature, -1) for x in (student_NV, teacher_NV))
    ids_NK = support_ids(ours_NV, theirs_NV, wanted.top_k, wanted.support)
    return coarse_reverse_kl(on_ids(ours_NV, ids_NK)[None], on_ids(theirs_NV, ids_NK)[None])[0]


def coarse_reverse_kl(
    student_top_BTK: Float[Tensor, "B T K"], teacher_top_BTK: Float[Tensor, "B T K"]
) -> Float[Tensor, "B T"]:
    """KL(student || teacher) on a support and one tail bucket, from log-probs of the same ids (arXiv 2606.09471)."""
    return kl(with_tail(student_top_BTK), with_tail(teacher_top_BTK))
