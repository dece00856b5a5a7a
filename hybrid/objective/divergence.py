"""Divergences between two next-token distributions, on the full vocabulary or on a support with one tail bucket.

With student p, teacher q and mixture m = beta * q + (1 - beta) * p:

    reverse_kl  KL(p || q)        forward_kl  KL(q || p)        jsd  beta * KL(q || m) + (1 - beta) * KL(p || m)

A truncated top-k sum is not a divergence (it can be negative); with the tail as one more outcome it is the
divergence of the coarsened distributions: non-negative, and at most the full one.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]


def kl(p_log: Float[Tensor, "*s V"], q_log: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """KL(p || q) in nats over the last axis; an outcome with p = 0 adds 0, whatever q is."""
    live = p_log > -torch.inf
    difference = (p_log.masked_fill(~live, 0) - q_log.masked_fill(~live, 0)) * p_log.exp()
    return difference.masked_fill(~live, 0).sum(-1)


def divergence(
    student_log: Float[Tensor, "*s V"], teacher_log: Float[Tensor, "*s V"], kind: DivergenceKind, beta: float = 0.5
) -> Float[Tensor, "*s"]:
    """The divergence of the module's first lines.

    Args:
      student_log: log-probs that sum to 1 over the last axis.
      teacher_log: the same outcomes under the teacher.
      kind: which divergence.
      beta: the teacher's share in the mixture of "jsd"; at 0.5 it is the Jensen-Shannon divergence.

    Returns:
      Nats per position.

    Reference:
      Agarwal et al., On-policy distillation of language models (GKD), section 3 (arXiv 2306.13649).
    """
    if kind == "reverse_kl":
        return kl(student_log, teacher_log)
    if kind == "forward_kl":
        return kl(teacher_log, student_log)
    share = torch.tensor([beta, 1 - beta], dtype=student_log.dtype, device=student_log.device).log()
    mixture_log = torch.logaddexp(teacher_log + share[0], student_log + share[1])
    return beta * kl(teacher_log, mixture_log) + (1 - beta) * kl(student_log, mixture_log)


def with_tail(top_log: Float[Tensor, "*s K"]) -> Float[Tensor, "*s K1"]:
    """Log-probs of a support, followed by the log of the mass that it leaves out."""
    # The tail's floor keeps the gradient of log1p finite where rounding makes the support sum to 1 or more.
    mass = top_log.exp().sum(-1, keepdim=True).clamp(max=1 - torch.finfo(top_log.dtype).eps)
    return torch.cat([top_log, torch.log1p(-mass)], -1)
