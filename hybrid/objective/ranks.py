"""Order statistics over the tokens that count."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROUNDING_ULPS = 64
"""Values closer than so many units in the last place are one value: log-probs of some -20 nats were subtracted."""


def linear_quantile(value_N: Float[Tensor, " N"], q: float) -> Float[Tensor, ""]:
    """The q-quantile with linear interpolation between neighbours (numpy's default), of any number of values.

    Args:
      value_N: at least one value.
      q: in [0, 1].
    """
    place = q * (len(value_N) - 1)
    low = int(place)
    high = min(low + 1, len(value_N) - 1)
    below, above = value_N.kthvalue(low + 1).values, value_N.kthvalue(high + 1).values
    return below + (above - below) * (place - low)


def masked_median(value_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Median of each row over the used entries: the mean of the middle two where their number is even; 0 for none."""
    count_B1 = use_BT.sum(-1, keepdim=True)
    if value_BT.shape[-1] == 0:
        return value_BT.new_zeros(len(value_BT))
    sorted_BT = value_BT.masked_fill(~use_BT, torch.inf).sort(-1).values
    low_B1 = sorted_BT.gather(-1, ((count_B1 - 1) // 2).clamp(min=0))
    high_B1 = sorted_BT.gather(-1, (count_B1 // 2).clamp(max=value_BT.shape[-1] - 1))
    return ((low_B1 + high_B1) / 2).masked_fill(count_B1 == 0, 0)[:, 0]


def unit_range(value_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Min-max to [0, 1] over the used entries of the whole batch; 0 where they are all equal up to rounding."""
    used_N = value_BT[use_BT]
    if len(used_N) == 0:
        return torch.zeros_like(value_BT)
    low, high = used_N.min(), used_N.max()
    rounding = ROUNDING_ULPS * torch.finfo(value_BT.dtype).eps * used_N.abs().max().clamp(min=1)
    if high - low <= rounding:
        return torch.zeros_like(value_BT)
    return ((value_BT - low) / (high - low)).masked_fill(~use_BT, 0)


def top_share(score_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"], percent: float) -> Bool[Tensor, "B T"]:
    """True on exactly ceil(percent / 100 * n) of the n used entries of the batch: the best; ties in order.

    Args:
      score_BT: higher is better.
      use_BT: entries that take part.
      percent: in (0, 100].
    """
    num_kept = int(torch.ceil(use_BT.sum().double() * percent / 100))
    score_N = score_BT.masked_fill(~use_BT, -torch.inf).flatten()
    best_N = score_N.argsort(descending=True, stable=True)[:num_kept]
    keep_N = torch.zeros_like(score_N, dtype=torch.bool)
    keep_N[best_N] = True
    return keep_N.view_as(use_BT) & use_BT


def top_share_per_response(
    score_BT: Float[Tensor, "B T"], use_BT: Bool[Tensor, "B T"], percent: float
) -> Bool[Tensor, "B T"]:
    """`top_share` within each response by itself."""
    order_BT = score_BT.masked_fill(~use_BT, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    num_kept_B1 = torch.ceil(use_BT.sum(-1, keepdim=True).double() * percent / 100)
    return use_BT & (order_BT < num_kept_B1)
