"""Checks that the engine computes the policy it was given: the producer's side of the probe.

Guarantee: pure. A version is refused when the engine's log-probs of the probe are not the trainer's, and when the engine's
stayed where they were although the trainer's have moved further than the two ever were apart. A probe that makes no sense
proves nothing and refuses nothing. An engine that slept must compute what it did before, ten times as closely.
"""

import struct
from typing import NamedTuple

from protocol.wire.messages import PolicyOffer


class Probe(NamedTuple):
    """Fixed tokens, and the trainer's log-prob of each but the first under one policy."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


_CLEAR_MOVE = 4.0  # times the largest difference between the two sides: then the engine must have moved, too,
_FOLLOWED = 0.1  # by more than this share of it
_MIN_CLEAR_MOVE = 1e-5  # nats
_SAME = 0.1  # of the tolerance: one engine, asked the same twice


def probe_of(offer: PolicyOffer) -> Probe | None:
    """Return the probe of an offer; None if there is none, or one that makes no sense."""
    if len(offer.probe_ids) < 8 or len(offer.probe_ids) % 4 or len(offer.probe_logprobs) != len(offer.probe_ids) - 4:
        return None
    count = len(offer.probe_ids) // 4
    token_ids = struct.unpack(f"<{count}i", offer.probe_ids)
    return Probe(token_ids, struct.unpack(f"<{count - 1}f", offer.probe_logprobs)) if min(token_ids) >= 0 else None


class SwapProof:
    """Compares version after version. The tolerance is in nats."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._reference: tuple[Probe, list[float]] | None = None  # the last version that the engine clearly followed
        self._noise = 0.0  # largest difference between the two sides for such a version

    def refusal(self, probe: Probe, engine: list[float]) -> str:
        """Return why the version is refused, "" if it is not."""
        difference = largest_difference(probe.logprobs, engine)
        if not difference <= self._tolerance:  # a NaN, too
            return (
                f"log-probs of the probe differ by {difference:.2g} from the trainer's, more than swap.probe_tolerance "
                f"({self._tolerance:g}): the engine does not compute this policy"
            )
        if self._reference is None or self._reference[0].token_ids != probe.token_ids:
            self._noise, self._reference = difference, (probe, engine)
            return ""
        before, engine_before = self._reference
        moved = largest_difference(probe.logprobs, before.logprobs)
        if moved > max(_MIN_CLEAR_MOVE, _CLEAR_MOVE * self._noise):
            followed = largest_difference(tuple(engine), engine_before)
            if followed <= _FOLLOWED * moved:
                return (
                    f"the swap changed nothing: the trainer's log-probs of the probe have moved by {moved:.2g}, the engine's by "
                    f"{followed:.2g}"
                )
            self._noise, self._reference = max(self._noise, difference), (probe, engine)
        return ""

    def change(self, before: list[float], after: list[float]) -> str:
        """Describe how far log-probs differ from those before; "" if they do not."""
        difference = largest_difference(tuple(before), after)
        if difference <= _SAME * self._tolerance:
            return ""
        return f"log-probs of the same tokens differ by {difference:.2g} from before"


def largest_difference(some: tuple[float, ...], others: list[float] | tuple[float, ...]) -> float:
    """The largest; NaN if there is one."""
    distances = [abs(one - other) for one, other in zip(some, others, strict=True)]
    return next((distance for distance in distances if distance != distance), max(distances))
