"""The streamed head against dense arithmetic: values, gradients of states, weights and bias."""

import pytest
import torch
from torch import nn

from hybrid.distributions import Request, measure
from hybrid.heads import CHUNK_TOKENS, Head
from hybrid.objective.losses import Divergence

LOSSES = (
    Divergence("reverse_kl", temperature=0.7),
    Divergence("forward_kl"),
    Divergence("jsd", beta=0.3),
    Divergence("reverse_kl", support="teacher", top_k=3),
)


def head_of(hidden: int, vocab: int, bias: bool) -> Head:
    torch.manual_seed(3)
    return Head(nn.Linear(hidden, vocab, bias=bias).double(), factor=1.5, cap=4.0)


def asked(tokens: int, hidden: int, vocab: int) -> tuple[torch.Tensor, Request]:
    torch.manual_seed(5)
    teacher = nn.Linear(hidden, vocab).double().requires_grad_(False)
    mask_BT = torch.rand(2, tokens) > 0.2
    support_BTK = torch.stack([torch.randperm(vocab)[:3] for _ in range(2 * tokens)]).view(2, tokens, 3)
    support_BTK[0, 0, 2] = -1
    hidden_BTH = torch.randn(2, tokens, hidden, dtype=torch.float64)
    teacher_BTH = torch.randn(2, tokens, hidden, dtype=torch.float64)
    log_BTV = torch.log_softmax(teacher(teacher_BTH), -1)
    request = Request(
        target_BT=torch.randint(vocab, (2, tokens)),
        mask_BT=mask_BT,
        temperature=0.9,
        divergences=LOSSES,
        teacher_hidden_BTH=teacher_BTH,
        teacher_head=teacher,
        support_ids_BTK=support_BTK,
        support_logprob_BTK=log_BTV.gather(-1, support_BTK.clamp(min=0)).masked_fill(support_BTK < 0, -torch.inf),
        num_top=2,
    )
    return hidden_BTH, request


def pulled(head, module, hidden_BTH, request):
    """Measurements, and the gradients of a sum in which each has a weight of its own."""
    hidden_BTH = hidden_BTH.clone().requires_grad_()
    module.zero_grad()
    found = measure(hidden_BTH, head, request)
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for name in ("logprobs", "entropies", "support_logprobs", *(f"divergence/{i}" for i in range(len(LOSSES)))):
        total = total + (found[name] * torch.rand(found[name].shape, generator=generator)).sum()
    total.backward()
    return found, [hidden_BTH.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [3, CHUNK_TOKENS + 1])
def test_slices_add_up_to_the_dense_pass(tokens, bias):
    head = head_of(8, 11, bias)
    hidden_BTH, request = asked(tokens, 8, 11)
    want, want_grads = pulled(lambda hidden: head(hidden), head.module, hidden_BTH, request)
    got, got_grads = pulled(head, head.module, hidden_BTH, request)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name])
    for one, other in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_frozen_head_passes_gradients_through():
    head = head_of(8, 11, True)
    hidden_BTH, request = asked(4, 8, 11)
    _, want = pulled(head, head.module, hidden_BTH, request)
    head.module.requires_grad_(False)
    _, got = pulled(head, head.module, hidden_BTH, request)
    torch.testing.assert_close(got[0], want[0])


def test_nothing_to_measure_is_a_zero_that_goes_backward():
    head = head_of(8, 11, False)
    hidden_BTH, request = asked(4, 8, 11)
    request.mask_BT[:] = False
    _, grads = pulled(head, head.module, hidden_BTH, request)
    assert all(grad.abs().sum() == 0 for grad in grads)


def test_autocast_holds_in_the_backward_pass():
    head = Head(nn.Linear(8, 11))
    hidden_BTH, request = asked(4, 8, 11)
    hidden_BTH = hidden_BTH.float().requires_grad_()
    request = Request(target_BT=request.target_BT, mask_BT=request.mask_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = measure(hidden_BTH, head, request)["logprobs"].sum()
    coarse.backward()
    fine = measure(hidden_BTH, head, request)["logprobs"].sum()
    assert hidden_BTH.grad is not None
    assert hidden_BTH.grad.dtype == torch.float32
    assert coarse != fine
    torch.testing.assert_close(coarse, fine, rtol=1e-2, atol=1e-2)
