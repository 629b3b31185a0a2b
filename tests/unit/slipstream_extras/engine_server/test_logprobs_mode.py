"""Whether log-probs are of the distribution that was sampled from, from two answers."""

import math

import numpy as np
import pytest

from slipstream_extras.engine_server.inspection import TEMPERATURE, mode_of


def top(logits: np.ndarray, temperature: float = 1.0, *, normalized: bool = True, count: int = 20) -> dict[str, float]:
    values = logits / temperature
    if normalized:
        values = values - np.log(np.exp(values).sum())
    best = np.argsort(-values)[:count]
    return {str(token): float(values[token]) for token in best}


def test_two_tokens_by_hand():
    half = {"a": math.log(0.8), "b": math.log(0.2)}
    z = 0.8 ** (1 / 0.7) + 0.2 ** (1 / 0.7)
    processed = {token: value / 0.7 - math.log(z) for token, value in half.items()}
    assert mode_of(half, processed) == "processed"
    assert mode_of(half, half) == "other"
    unnormalized = {token: value / 0.7 for token, value in half.items()}
    assert mode_of(half, unnormalized) == "other"


@pytest.mark.parametrize("vocabulary", [5, 300, 50_000])
@pytest.mark.parametrize("spread", [2.0, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_every_mode_of_vllm(vocabulary: int, spread: float, noise: float):
    random = np.random.default_rng(vocabulary)
    logits = random.normal(3, spread, vocabulary)
    noisy = logits + random.normal(0, noise, vocabulary)
    assert mode_of(top(logits), top(noisy, TEMPERATURE)) == "processed"
    assert mode_of(top(logits), top(noisy)) == "other", "raw_logprobs"
    assert mode_of(top(logits, normalized=False), top(noisy, normalized=False)) == "other", "raw_logits"
    processed_logits = top(logits, normalized=False), top(noisy, TEMPERATURE, normalized=False)
    assert mode_of(*processed_logits) == "other"


def test_a_distribution_that_temperature_does_not_change_says_nothing():
    certain = {"a": 0.0}
    assert mode_of(certain, certain) == "nothing"
    even = {token: math.log(0.25) for token in "abcd"}
    assert mode_of(even, even) == "nothing"
    assert mode_of({}, {}) == "other"
