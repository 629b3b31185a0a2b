"""Whether a server returns log-probs of the distribution that it sampled from (`--logprobs-mode processed_logprobs`).

Guarantee: pure. At temperature 1 all modes that return log-probs agree. At temperature T a token of log-prob p has p / T - log Z,
where Z is the sum of exp(p / T) over the vocabulary; of the tokens that are not known, their sum of probabilities and the least
known one bound what they add to Z. A distribution of which this cannot be told apart from p says nothing.
"""

import math
from collections.abc import Iterable
from typing import Literal

TEMPERATURE = 0.7

Finding = Literal["processed", "other", "nothing"]
_TOLERANCE = 0.1  # nats, by which log-probs of one prompt may differ from request to request


def mode_of(at_one: dict[str, float], at_temperature: dict[str, float]) -> Finding:
    """What two requests of the same prompt show, at temperature 1 and at `TEMPERATURE`: log-probs by token, of the likeliest."""
    both = sorted(at_one.keys() & at_temperature.keys())
    if not both or any(_sum_of_exp(values.values()) > math.exp(_TOLERANCE) for values in (at_one, at_temperature)):
        return "other"  # no log-probs at all
    divided = [at_one[token] / TEMPERATURE for token in both]
    shifts = [at_temperature[token] - value for token, value in zip(both, divided, strict=True)]
    unchanged = [at_one[token] - value for token, value in zip(both, divided, strict=True)]
    low, high = _log_z_bounds(list(at_one.values()))
    if _spread(unchanged) <= 2 * _TOLERANCE:
        return "nothing"
    shift = (max(shifts) + min(shifts)) / 2
    is_processed = _spread(shifts) <= _TOLERANCE and -high - _TOLERANCE <= shift <= -low + _TOLERANCE
    return "processed" if is_processed else "other"


def _log_z_bounds(logprobs: list[float]) -> tuple[float, float]:
    known = _sum_of_exp(value / TEMPERATURE for value in logprobs)
    rest = max(0.0, 1.0 - _sum_of_exp(logprobs))
    most = rest * math.exp(min(logprobs) * (1 / TEMPERATURE - 1))
    return math.log(known), math.log(known + most)


def _sum_of_exp(values: Iterable[float]) -> float:
    return math.fsum(math.exp(min(value, 50.0)) for value in values)  # logits may be large


def _spread(values: list[float]) -> float:
    return max(values) - min(values)
