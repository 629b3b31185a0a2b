"""The LM head: tiles, and the precision it computes in."""

import pytest
import torch
from torch.nn.functional import linear

from consumer.learn.forward import TokenLogprobs

TEMPERATURE = 0.8
ROUNDINGS = 100  # of a sum over a vocabulary of seven and what is made of it


def head(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return TokenLogprobs.apply(*inputs, TEMPERATURE, True)


def test_it_makes_no_more_logits_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer.learn.forward._MIN_TILE_TOKENS", 4)
    monkeypatch.setattr("consumer.learn.forward._TILE_ELEMENTS", 4)
    made = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: made.append(len(a[0])) or linear(*a))
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=draw).double() for shape in ((10, 3), (7, 3), (7,)))
    hidden, targets = hidden.requires_grad_(), torch.arange(10) % 7
    values = head(hidden, weight, bias, targets)
    assert made == [4, 4, 2]
    [slope] = torch.autograd.grad((values[0] * 2 + values[1]).sum(), hidden)
    log_p = (linear(hidden, weight, bias) / TEMPERATURE).log_softmax(-1)
    expected = 2 * log_p.gather(1, targets[:, None]).sum() - (log_p.exp() * log_p).sum()
    tolerance = ROUNDINGS * torch.finfo(slope.dtype).eps
    torch.testing.assert_close(slope, torch.autograd.grad(expected, hidden)[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_the_wider_of_float32_and_what_it_is_given(given: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=draw).to(given) for shape in ((4, 3), (7, 3)))
    logprobs, entropies = head(hidden, weight, None, torch.arange(4))
    assert logprobs.dtype == entropies.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    log_p = (linear(hidden, weight).double() / TEMPERATURE).log_softmax(-1)
    tolerance = ROUNDINGS * torch.finfo(logprobs.dtype).eps
    torch.testing.assert_close(logprobs.double(), log_p.diagonal(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(entropies.double(), -(log_p.exp() * log_p).sum(-1), atol=tolerance, rtol=tolerance)
