"""Checks that the engine computes the policy it was given: the producer's side of the probe.

Guarantee: it computes with the numbers that it is given, and does nothing else. A version is judged by changes: how far the
log-prob of each token has moved since a reference, in the engine and in the trainer. Errors that both versions share, such as
those of a format, cancel. References are the base, and the last version that was clearly proved. A change below the noise proves
nothing and refuses nothing, and neither does a probe that makes no sense.

Symbols: t are the trainer's log-probs, and e are the engine's; dt and de are their changes since a reference. x is the trainer's
change in float32 arithmetic, and d = de - dt. Each token has the weight g = x / (x² + c²), with c a usual |x|. So tokens that
moved far count alike, and those that hardly moved count little. An engine that lacks the share q of the change has
d = -q dt + noise, so -Σ g d / Σ g dt estimates q. Where the noise of each token is as likely up as down, |Σ g d| exceeds
z √(Σ g² d²) with a probability of at most 2 exp(-z² / 2). That holds for noise of any size, even if it differs between tokens
(Hoeffding, 1963).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from producer.engine_contract import Rows, Scored
from producer.metrics import Comparison, Verdict
from protocol.wire.messages import PolicyOffer

Numbers = NDArray[np.float64]

_CLEAR = 5.0  # z, for at most one wrong refusal in 40,000 comparisons
_LOUD = 6.0  # times the noise between engine and trainer
_LEAST_NOISE = 1e-5  # nats, of float32: on a CPU less may be measured by luck, when two passes have equal bits
_PROVES = 0.5  # if a lack of this share would be refused, the version is the next reference
_STALE = (
    "it serves keys and values of another version; turn the cache off with `engine: {enable_prefix_caching: false}`, or that "
    "of a server with --no-enable-prefix-caching"
)
_SAME = 0.1  # of the tolerance, for one engine that is asked the same twice


class ReceivedProbe(NamedTuple):
    """R rows of L tokens, and the trainer's log-probs of each token but the first of its row, float64 (R * (L - 1),).

    There are log-probs of the base, and of the policy unless it was not measured. The exact ones are those in float32 arithmetic.
    They are None if the trainer's format is float32 anyway, or if it cannot compute them."""

    rows: tuple[tuple[int, ...], ...]
    base: Numbers
    exact_base: Numbers | None
    policy: Numbers | None
    exact: Numbers | None


def probe_of(offer: PolicyOffer) -> ReceivedProbe | None:
    """Return the probe of an offer. Return None if it has none, or one that makes no sense."""
    probe = offer.probe
    if probe is None or len(probe.token_ids) % (4 * probe.row_length):
        return None
    ids = np.frombuffer(probe.token_ids, "<i4").reshape(-1, probe.row_length)
    count = ids.size - len(ids)
    parts = [_numbers(part, count) for part in (probe.base, probe.exact_base, probe.policy, probe.exact)]
    if not count or ids.min() < 0 or parts[0] is None:
        return None
    return ReceivedProbe(tuple(tuple(row) for row in ids.tolist()), parts[0], *parts[1:])


def _numbers(part: bytes, count: int) -> Numbers | None:
    return np.frombuffer(part, "<f4").astype(np.float64) if len(part) == 4 * count else None


class Measured(NamedTuple):
    """Log-probs of one version, float64 (N,), by trainer and engine. `exact` are the trainer's in float32 arithmetic, or None."""

    trainer: Numbers
    exact: Numbers | None
    engine: Numbers

    @property
    def noise(self) -> float:
        """Return the root mean square of engine minus trainer, in nats."""
        return max(_LEAST_NOISE, rms(self.engine - self.trainer))


def compare(version: Measured, reference: Measured, slack: float) -> Comparison:
    """Compare the engine's change since the reference with the trainer's. The scale c is the one of three that sees most: the
    median of |x|, its mean or its root mean square.

    Args:
        slack: the lack, or excess, that is never refused, even if it is clear.
    """
    dt, de = version.trainer - reference.trainer, version.engine - reference.engine
    d, x, own_noise = de - dt, dt, reference.noise
    if version.exact is not None and reference.exact is not None:
        x, own_noise = version.exact - reference.exact, 0.0
    moved = np.abs(x[x != 0])
    nothing = Comparison(rms(dt), rms(d), 0.0, math.inf, math.inf)
    if not moved.size or not np.isfinite(d).all():
        return nothing
    scales = (float(np.median(moved)), float(np.mean(moved)), rms(moved))
    found = (_weighed(dt, d, x, scale, own_noise, slack) for scale in scales)
    lack, bound, share = min(found, key=lambda one: (one[2], one[1]))
    return nothing._replace(lack=lack, bound=bound, share=share)


def _weighed(
    dt: Numbers, d: Numbers, x: Numbers, scale: float, own_noise: float, slack: float
) -> tuple[float, float, float]:
    """Return lack, bound and share with this scale.

    Where x is dt, it has a noise η of at most 2 `own_noise`² in power. This noise makes the engine seem to lack
    E[Σ g η] <= N 2 `own_noise`² / c² of Σ g dt, because no slope of g exceeds 1 / c². That much is taken off.
    """
    g = x * scale / (x * x + scale * scale)  # times c, which cancels
    bias = x.size * 2 * own_noise**2 / scale
    change, error = float(g @ dt), float(np.sqrt(np.sum((g * d) ** 2)))
    if change <= bias:
        return 0.0, math.inf, math.inf
    lack = float(-(g @ d))
    fitted = d + dt * lack / change
    share = _least_share(change, float(np.sum((g * dt) ** 2)), float(np.sum((g * fitted) ** 2)), slack + bias / change)
    lack -= min(bias, max(0.0, lack))
    return lack / change, slack + _CLEAR * error / change, share


def _least_share(change: float, power: float, noise: float, slack: float) -> float:
    """Solve (q - slack) change = z √(q² power + noise) for q. This is the rule of refusal with d = -q dt + noise put in."""
    a, b = change**2 - _CLEAR**2 * power, slack * change**2
    if a <= 0:
        return math.inf
    return (b + math.sqrt(b * b - a * (slack**2 * change**2 - _CLEAR**2 * noise))) / a


class SwapProof:
    """The judge of version after version.

    Args:
        tolerance: the largest root mean square of engine minus trainer, in nats.
        slack: the share of every change that a format may lose; see `compare`.
    """

    def __init__(self, tolerance: float, slack: float = 0.05) -> None:
        self._tolerance = tolerance
        self._slack = slack
        self._rows: tuple[tuple[int, ...], ...] = ()
        self._references: dict[str, Measured] = {}

    def needs_base(self, probe: ReceivedProbe) -> bool:
        """Return whether these tokens were never measured with the engine's base."""
        return self._rows != probe.rows

    def note_base(self, probe: ReceivedProbe, engine: Sequence[Scored] | None) -> None:
        """Begin with these tokens, and with the log-probs of the engine's base (None: the engine has no base any more)."""
        self._rows, self._references = probe.rows, {}
        if engine is not None:
            self._references["base"] = _measured(probe.base, probe.exact_base, engine, probe)

    def verdict(self, probe: ReceivedProbe, engine: Sequence[Scored]) -> Verdict:
        """Judge a version that the trainer measured, by the engine's log-probs of its tokens."""
        assert probe.policy is not None
        version = _measured(probe.policy, probe.exact, engine, probe)
        found = {name: compare(version, reference, self._slack) for name, reference in self._references.items()}
        refusal = self._refusal(version, found, list(self._references.values())) or _stale(version, engine, probe.rows)
        if not refusal and all(one.share <= _PROVES for one in found.values()):
            self._references["before"] = version
        return Verdict(refusal, rms(version.engine - version.trainer), found)

    def unlike(self, one: Scored, other: Scored, bases: tuple[Scored, Scored] | None, rows: Rows) -> str:
        """Describe how the log-probs of one engine for a row differ from those of another one; "" if they do not.

        Args:
            bases: log-probs of the row without an adapter, by both engines.
            rows: all rows that the first engine has been asked for.
        """
        version = Measured(_joined([other]), None, _joined([one]))
        known = [] if bases is None else [Measured(_joined([bases[1]]), None, _joined([bases[0]]))]
        found = dict(zip(("base",), (compare(version, base, self._slack) for base in known), strict=False))
        return self._refusal(version, found, known) or _stale(version, [one], rows)

    def change(self, before: Sequence[Scored], after: Sequence[Scored]) -> str:
        """Describe how far log-probs differ from those before; "" if they do not."""
        difference = rms(_joined(before) - _joined(after))
        if difference <= _SAME * self._tolerance:
            return ""
        return f"log-probs of the same tokens differ by {difference:.2g} from before"

    def _refusal(self, version: Measured, found: dict[str, Comparison], references: list[Measured]) -> str:
        difference = rms(version.engine - version.trainer)
        if not difference <= self._tolerance:  # also true of NaN
            return (
                f"log-probs of the probe differ by {difference:.2g} from the trainer's, more than swap.probe_tolerance "
                f"({self._tolerance:g}): the engine does not compute this policy"
            )
        noise = max((reference.noise for reference in references), default=math.inf)
        for name, one in found.items():
            since = "the base" if name == "base" else "an earlier version"
            if one.is_refused:
                return (
                    f"since {since} the trainer's log-probs of the probe have moved by {one.moved:.2g}, and the engine lacks "
                    f"{one.lack:.0%} of that, more than noise explains ({one.bound:.0%}): it does not compute this policy"
                )
            if one.noise > _LOUD * noise:
                return (
                    f"since {since} the engine's log-probs of the probe have moved otherwise than the trainer's, by "
                    f"{one.noise:.2g}, where {noise:.2g} is usual: it does not compute this policy"
                )
        return ""


def _stale(version: Measured, engine: Sequence[Scored], rows: Rows) -> str:
    """Describe why the prefix cache is not this version's; "" if it may be. The first requests of a version can find no more of a
    row than another row begins with. Log-probs of tokens that were sampled with the cache, as rollouts are, are compared with
    their scores without it."""
    shared = max((_shared(*pair) for pair in itertools.pairwise(sorted(map(tuple, rows)))), default=0)
    if (cached := max(row.cached for row in engine)) > shared:
        return (
            f"the first request of this version found {cached} tokens in the engine's prefix cache, which no request of this "
            f"version has computed: {_STALE}"
        )
    apart = [one - other for row in engine for one, other in zip(row.sampled, row.rescored, strict=True)]
    found = rms(np.array(apart)) if apart else 0.0
    if found <= _LOUD * version.noise:
        return ""
    return (
        f"log-probs of sampled tokens differ by {found:.2g} from those that the engine computes of them without its prefix "
        f"cache, where {version.noise:.2g} is usual: {_STALE}"
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two rows begin with alike."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _measured(trainer: Numbers, exact: Numbers | None, engine: Sequence[Scored], probe: ReceivedProbe) -> Measured:
    """Take as many tokens of each row as the engine scored, because its longest sequence may be shorter than a row."""
    length = len(probe.rows[0]) - 1
    scored = [len(row.logprobs) for row in engine]
    kept = np.concatenate([np.arange(count) + length * number for number, count in enumerate(scored)])
    return Measured(trainer[kept], None if exact is None else exact[kept], _joined(engine))


def _joined(rows: Sequence[Scored]) -> Numbers:
    return np.concatenate([np.asarray(row.logprobs, np.float64) for row in rows])


def rms(numbers: Numbers) -> float:
    """Return the root mean square. It is NaN if one of the numbers is."""
    return float(np.sqrt(np.mean(numbers**2)))
