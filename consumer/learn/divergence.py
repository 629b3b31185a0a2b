"""The divergence of the policy from a teacher in the place of a token: generalized Jensen-Shannon (GKD, arXiv:2306.13649, eq. 1).

Guarantee: values and gradients are those of the distributions over buckets: the sampled token, the teacher's likeliest tokens
beside it, and all the rest together. They are finite, also where the rest of either has no probability in float32. A bucket that
the vocabulary leaves nothing for does not count. Without one, divergence and gradient are those of the whole distributions.

With t the teacher's probabilities, s the policy's, and m = β t + (1 - β) s:

    β = 0           Σ t (log t - log s)                                      d / d log s = -t
    0 < β < 1       Σ β t (log t - log m) + (1 - β) s (log s - log m)        d / d log s = (1 - β) s (log s - log m)
    β = 1           Σ s (log s - log t)                                      d / d log s = s (log s - log t)

up to what a sum of s that is 1 adds to the last. With g that derivative and G = Σ g, the derivative by the logit of token v of
bucket u is g_u p_v / s_u - G p_v.
"""

import math
from typing import NamedTuple

import torch

_LEAST_REST = 1e-6  # of the teacher's probability: what its log-probs, in float32, may leave by rounding
_NOTHING = -1e4  # the log-prob of no bucket; its exponential is 0


class Teacher(NamedTuple):
    """A teacher's log-probs for N places."""

    ids: torch.Tensor  # int64 (N, 1 + k), the sampled token first
    logprobs: torch.Tensor  # (N, 1 + k), -inf for what is no bucket, whose id is that of the sampled token
    beta: float

    def of(self, places: slice) -> "Teacher":
        return Teacher(self.ids[places], self.logprobs[places], self.beta)


def tile_divergences(log_p: torch.Tensor, p: torch.Tensor, teacher: Teacher) -> tuple[torch.Tensor, torch.Tensor]:
    """Return divergences (n,) of probabilities (n, V), and their gradients with respect to the logits of these, (n, V)."""
    is_bucket = teacher.logprobs > -math.inf
    rest = p.scatter(1, teacher.ids, 0.0).sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    taught_rest = (1 - teacher.logprobs.double().exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST).log()
    has_rest = is_bucket.sum(1, keepdim=True) < log_p.size(1)
    counts = torch.cat([is_bucket, has_rest], 1)
    s = torch.cat([log_p.gather(1, teacher.ids), rest.log()], 1).masked_fill(~counts, _NOTHING)
    t = torch.cat([teacher.logprobs.to(log_p), taught_rest.to(log_p)], 1).masked_fill(~counts, _NOTHING)
    values, slopes = _divergences(s, t, teacher.beta)
    total = slopes.sum(1, keepdim=True)
    of_ids = (slopes - total * s.exp())[:, :-1]
    of_ids = torch.where(is_bucket, of_ids, of_ids[:, :1])
    return values, (p * (slopes[:, -1:] / rest - total)).scatter_(1, teacher.ids, of_ids)


def _divergences(s: torch.Tensor, t: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return divergences (n,) of log-probs of buckets (n, u), and their derivatives by `s`, (n, u)."""
    if beta == 0:
        taught = t.exp()
        return (taught * (t - s)).sum(1), -taught
    if beta == 1:
        slopes = s.exp() * (s - t)
        return slopes.sum(1), slopes
    m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
    slopes = (1 - beta) * s.exp() * (s - m)
    return (beta * t.exp() * (t - m) + slopes).sum(1), slopes
