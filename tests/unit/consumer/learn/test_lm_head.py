"""The LM head: tiles, and the precision it computes in."""

import pytest
import torch
from torch.nn.functional import linear

from consumer.learn.forward import TokenLogprobs

TEMPERATURE = 0.8
ROUNDINGS = 100  # of a sum over a vocabulary of seven and what is made of it


def head(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return TokenLogprobs.apply(*inputs, TEMPERATURE, True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each tile of logits, of at most four."""
    found: list[int] = []
    monkeypatch.setattr("consumer.learn.forward._MIN_TILE_TOKENS", 4)
    monkeypatch.setattr("consumer.learn.forward._TILE_ELEMENTS", 4)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: found.append(len(a[0])) or linear(*a))
    return found


def drawn(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of ten tokens, weights, a bias, and targets."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((10, 3), (7, 3), (7,)))
    return hidden, weight, bias, torch.arange(10) % 7


def test_it_makes_no_more_logits_than_a_tile_and_those_of_a_frozen_head_once(made: list[int]) -> None:
    hidden, weight, bias, targets = drawn()
    hidden.requires_grad_()
    values = head(hidden, weight, bias, targets)
    [slope] = torch.autograd.grad((values[0] * 2 + values[1]).sum(), hidden)
    assert made == [4, 4, 2]
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


@pytest.mark.long
@pytest.mark.parametrize("entropy_trains", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1)])
def test_the_gradients_of_a_head_that_is_trained(
    made: list[int], frozen: tuple[int, ...], entropy_trains: bool
) -> None:
    *inputs, targets = drawn()
    for index, each in enumerate(inputs):
        each.requires_grad_(index not in frozen)

    def values(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = TokenLogprobs.apply(*given, targets, TEMPERATURE, entropy_trains)
        return found if entropy_trains else found[:1]

    assert torch.autograd.gradcheck(values, inputs)
    del made[:]
    sum(each.sum() for each in values(*inputs)).backward()
    assert made == [4, 4, 2] * 2


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_the_gradients_of_weights_in_few_bits(given: torch.dtype) -> None:
    """The sum over tokens is made in float32."""
    *inputs, targets = drawn(given)
    inputs = [each.requires_grad_() for each in inputs]
    weights = torch.arange(10.0).sin()
    logprobs, entropies = head(*inputs, targets)
    (logprobs * weights + entropies).sum().backward()
    exact = [each.detach().double().requires_grad_() for each in inputs]
    log_p = (linear(*exact) / TEMPERATURE).log_softmax(-1)
    (log_p.gather(1, targets[:, None])[:, 0] * weights.double() - (log_p.exp() * log_p).sum(-1)).sum().backward()
    tolerance = ROUNDINGS * torch.finfo(given).eps
    for own, other in zip(inputs, exact, strict=True):
        assert own.grad is not None
        assert own.grad.dtype == given
        torch.testing.assert_close(own.grad.double(), other.grad, atol=tolerance, rtol=tolerance)
