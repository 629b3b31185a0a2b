"""Divergences from a teacher: by hand, against whole distributions in float64, and against TRL's loss of GKD."""

import math

import pytest
import torch
from torch.nn.functional import linear

from consumer.learn.divergence import Teacher, tile_divergences
from consumer.learn.forward import TokenLogprobs

TEMPERATURE = 0.8
BETAS = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])

P = [0.5, 0.25, 0.125, 0.125]
BY_HAND = {
    0.0: (0.2 * math.log(0.4) + 0.6 * math.log(2.4) + 0.2 * math.log(0.8), [0.3, -0.35, 0.025, 0.025]),
    0.5: (
        0.1 * math.log(0.2 / 0.35) + 0.3 * math.log(0.6 / 0.425) + 0.1 * math.log(0.2 / 0.225)
        + 0.25 * math.log(0.5 / 0.35) + 0.125 * math.log(0.25 / 0.425) + 0.125 * math.log(0.25 / 0.225),
        [0.5 * math.log(0.5 / 0.35), 0.5 * math.log(0.25 / 0.425), 0.5 * math.log(0.25 / 0.225)],
    ),
    1.0: (
        0.5 * math.log(2.5) + 0.25 * math.log(5 / 12) + 0.25 * math.log(1.25),
        [math.log(2.5), math.log(5 / 12), math.log(1.25)],
    ),
}  # fmt: skip
"""Of the sampled token 0, token 1, and the rest of a vocabulary of four, for which the teacher has 0.2, 0.6 and 0.2: divergence,
and gradient or w of p (w - Σ s w)."""


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("beta", BY_HAND)
def test_by_hand(beta: float) -> None:
    p = torch.tensor([P])
    teacher = Teacher(torch.tensor([[0, 1]]), torch.tensor([[0.2, 0.6]]).log(), beta)
    values, slopes = tile_divergences(p.log(), p, teacher)
    expected, gradient = BY_HAND[beta]
    if beta:
        mean = 0.5 * gradient[0] + 0.25 * gradient[1] + 0.25 * gradient[2]
        gradient = [one * (gradient[min(place, 2)] - mean) for place, one in enumerate(P)]
    assert values.tolist() == pytest.approx([expected], abs=1e-15)
    torch.testing.assert_close(slopes, torch.tensor([gradient]), atol=1e-15, rtol=0)


@pytest.mark.usefixtures("float64")
@BETAS
def test_a_likeliest_token_that_was_sampled_or_that_there_is_none_of_is_no_bucket(beta: float) -> None:
    p = torch.tensor([P])
    pair = Teacher(torch.tensor([[0, 1]]), torch.tensor([[0.2, 0.6]]).log(), beta)
    more = Teacher(torch.tensor([[0, 0, 1, 0]]), torch.tensor([[0.2, 0, 0.6, 0]]).log(), beta)
    for one, other in zip(tile_divergences(p.log(), p, pair), tile_divergences(p.log(), p, more), strict=True):
        torch.testing.assert_close(one, other, atol=1e-15, rtol=0)


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * (one.log() - other.log())).sum(-1)


def whole(logits: torch.Tensor, ids: list[int], taught: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of one place: `taught` has the teacher's probabilities of these different tokens."""
    p = logits.softmax(-1)
    s = torch.cat([p[ids], (1 - p[ids].sum())[None]])
    t = torch.cat([taught, (1 - taught.sum())[None]])
    if len(ids) == len(p):
        s, t = s[:-1], t[:-1]
    if beta in (0, 1):
        return kl(s, t) if beta else kl(t, s)
    mixture = beta * t + (1 - beta) * s
    return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


@pytest.mark.usefixtures("float64")
@BETAS
@pytest.mark.parametrize("k", [1, 3, 6])
def test_values_and_gradients_in_tiles_are_those_of_the_whole_distribution(
    monkeypatch: pytest.MonkeyPatch, beta: float, k: int
) -> None:
    monkeypatch.setattr("consumer.learn.forward._MIN_TILE_TOKENS", 4)
    monkeypatch.setattr("consumer.learn.forward._TILE_ELEMENTS", 4)
    draw = torch.Generator().manual_seed(k)
    hidden, weight, bias, taught = (torch.randn(*size, generator=draw) for size in ((10, 3), (7, 3), (7,), (10, 7)))
    hidden, taught, targets = hidden.requires_grad_(), (2 * taught).softmax(-1), torch.arange(10) % 7
    ids, logprobs, expected = targets[:, None].repeat(1, 1 + k), torch.full((10, 1 + k), -math.inf), []
    for place, token in enumerate(targets.tolist()):
        others = [one for one in taught[place].argsort(descending=True)[:k].tolist() if one != token]
        buckets = [token, *others]
        ids[place, : len(buckets)] = torch.tensor(buckets)
        logprobs[place, : len(buckets)] = taught[place, buckets].log()
        logits = (linear(hidden[place], weight, bias)) / TEMPERATURE
        expected.append(whole(logits, buckets, taught[place, buckets], beta))
    found = TokenLogprobs.apply(hidden, weight, bias, targets, TEMPERATURE, True, Teacher(ids, logprobs, beta))
    weights = torch.arange(10.0).sin()
    torch.testing.assert_close(found[2], torch.stack(expected), atol=1e-13, rtol=0)
    [slope] = torch.autograd.grad((found[2] * weights + found[0] + found[1]).sum(), hidden, retain_graph=True)
    log_p = (linear(hidden, weight, bias) / TEMPERATURE).log_softmax(-1)
    rest = log_p.gather(1, targets[:, None]).sum() - (log_p.exp() * log_p).sum()
    [wanted] = torch.autograd.grad((torch.stack(expected) * weights).sum() + rest, hidden)
    torch.testing.assert_close(slope, wanted, atol=1e-13, rtol=0)
    assert wanted.abs().max() > 1e-2


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@BETAS
def test_the_gradients_of_a_head_that_is_trained(monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    monkeypatch.setattr("consumer.learn.forward._MIN_TILE_TOKENS", 4)
    monkeypatch.setattr("consumer.learn.forward._TILE_ELEMENTS", 4)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, generator=draw).requires_grad_() for size in ((6, 3), (7, 3), (7,))]
    ids, taught = torch.tensor([[0, 1, 2]] * 6), torch.tensor([[0.5, 0.25, 0.125]] * 6)
    teacher = Teacher(ids, taught.log(), beta)
    assert torch.autograd.gradcheck(
        lambda *given: TokenLogprobs.apply(*given, ids[:, 0], TEMPERATURE, True, teacher), inputs
    )


@pytest.mark.usefixtures("float64")
@BETAS
@pytest.mark.parametrize("k", [6, 7])
def test_with_all_of_the_vocabulary_it_is_trls_loss(monkeypatch: pytest.MonkeyPatch, beta: float, k: int) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    draw = torch.Generator().manual_seed(1)
    hidden, weight, teachers = (torch.randn(*size, generator=draw) for size in ((5, 3), (7, 3), (5, 7)))
    hidden, targets = hidden.requires_grad_(), torch.arange(5)
    top = teachers.scatter(1, targets[:, None], math.inf if k == 7 else -math.inf).argsort(descending=True)[:, :k]
    ids = torch.cat([targets[:, None], top], 1)
    logprobs = teachers.log_softmax(-1).gather(1, ids)
    if k == 7:  # the sampled token is among them
        logprobs[:, 1] = -math.inf
    *_, ours = TokenLogprobs.apply(hidden, weight, None, targets, 1.0, False, Teacher(ids, logprobs, beta))
    theirs = GKDTrainer.generalized_jsd_loss(linear(hidden, weight)[None], teachers[None], beta=beta, reduction="sum")
    assert ours.sum().item() == pytest.approx(theirs.item(), abs=1e-13)
    [slope], [wanted] = (torch.autograd.grad(each, hidden) for each in (ours.sum(), theirs))
    torch.testing.assert_close(slope, wanted, atol=1e-13, rtol=0)


@BETAS
@pytest.mark.parametrize("gap", [0.0, 5.0, 30.0, 200.0])
@pytest.mark.parametrize("taught", [[0.9, 0.099], [0.5, 0.5], [0.6, 0.4005], [1.0, 1e-30]])
def test_it_is_finite_where_the_rest_is_next_to_nothing(beta: float, gap: float, taught: list[float]) -> None:
    logits = torch.tensor([[gap, gap, 0.0, 0.0, -1.0], [0.0, 0.0, gap, 0.0, 0.0], [gap, -gap, 0.0, 0.0, 0.0]])
    teacher = Teacher(torch.tensor([[0, 1]] * 3), torch.tensor([taught] * 3).log(), beta)
    values, slopes = tile_divergences(logits.log_softmax(-1), logits.softmax(-1), teacher)
    assert values.isfinite().all()
    assert slopes.isfinite().all()
    assert (values > -1e-6).all()
    assert (slopes.sum(1).abs() < 1e-5 * (1 + slopes.abs().max())).all(), "a gradient by logits adds up to 0"
    assert slopes.abs().max() < (2 if beta < 1 else 300)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_it_is_computed_in_float32_at_least(given: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=draw).to(given) for size in ((4, 3), (7, 3)))
    ids, taught = torch.tensor([[0, 1, 2]] * 4), torch.tensor([[0.5, 0.25, 0.125]] * 4)
    *_, found = TokenLogprobs.apply(
        hidden, weight, None, ids[:, 0], TEMPERATURE, False, Teacher(ids, taught.log(), 0.5)
    )
    logits = linear(hidden, weight).double() / TEMPERATURE
    expected = [whole(each, [0, 1, 2], taught[0].double(), 0.5) for each in logits]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-6, rtol=1e-6)
