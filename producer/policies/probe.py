"""Checks that the engine computes the policy it was given: the producer's side of the probe.

Guarantee: pure. A version is judged by changes: how far the log-prob of each token has moved since a reference, in the engine
and in the trainer. Errors that both versions share, such as those of a format, cancel. References are the base, and the last
version that was clearly proved. A change below the noise proves nothing and refuses nothing, and a probe that makes no sense
neither.

Symbols: t are the trainer's log-probs and e the engine's, dt and de their changes since a reference, x the trainer's change in
float32 arithmetic, and d = de - dt. Each token has the weight g = x / (x² + c²), with c a usual |x|: tokens that moved far count
alike, and those that hardly moved count little. An engine that lacks the share q of the change has d = -q dt + noise, so
-Σ g d / Σ g dt estimates q. Where noise is as likely up as down, token by token, |Σ g d| exceeds z √(Σ g² d²) with a probability
of at most 2 exp(-z² / 2), whatever its size and however it differs between tokens (Hoeffding, 1963).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from producer.engine_contract import Scored
from producer.metrics import Comparison, Verdict
from protocol.wire.messages import PolicyOffer

Numbers = NDArray[np.float64]

_CLEAR = 5.0  # z: a wrong refusal in 40,000 comparisons, at most
_LOUD = 6.0  # times the noise between engine and trainer
_LEAST_NOISE = 1e-5  # nats, of float32: what is measured on a CPU may be less by luck, when two passes have equal bits
_PROVES = 0.5  # a version whose lack of so much would be refused is the next reference
_SAME = 0.1  # of the tolerance: one engine, asked the same twice


class ReceivedProbe(NamedTuple):
    """The rows of tokens (R of L each), and the trainer's log-probs of each token but the first of its row, float64
    (R * (L - 1),): of the base and of the policy (None: it was not measured), each also in float32 arithmetic (None: the
    trainer's format is float32, or it cannot)."""

    rows: tuple[tuple[int, ...], ...]
    base: Numbers
    exact_base: Numbers | None
    policy: Numbers | None
    exact: Numbers | None


def probe_of(offer: PolicyOffer) -> ReceivedProbe | None:
    """Return the probe of an offer; None if there is none, or one that makes no sense."""
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
    """Log-probs of one version, float64 (N,): the trainer's, its own in float32 arithmetic or None, and the engine's."""

    trainer: Numbers
    exact: Numbers | None
    engine: Numbers

    @property
    def noise(self) -> float:
        """Return the root mean square of engine minus trainer, in nats."""
        return max(_LEAST_NOISE, rms(self.engine - self.trainer))


def compare(version: Measured, reference: Measured, slack: float) -> Comparison:
    """Compare the engine's change since the reference with the trainer's, with the scale c that sees most: the median of |x|, its
    mean or its root mean square.

    Args:
        slack: lack, or excess, that is not refused, however clear it is.
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

    Where x is dt, its noise η, of at most 2 `own_noise`² in power, makes the engine seem to lack E[Σ g η] <= N 2 `own_noise`² /
    c² of Σ g dt, because no slope of g exceeds 1 / c². That is taken off.
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
    """Solve (q - slack) change = z √(q² power + noise) for q, which is d = -q dt + noise in the rule of refusal."""
    a, b = change**2 - _CLEAR**2 * power, slack * change**2
    if a <= 0:
        return math.inf
    return (b + math.sqrt(b * b - a * (slack**2 * change**2 - _CLEAR**2 * noise))) / a


class SwapProof:
    """Judges version after version.

    Args:
        tolerance: the largest root mean square of engine minus trainer, in nats.
        slack: see `compare`; what a format loses of every change alike.
    """

    def __init__(self, tolerance: float, slack: float = 0.05) -> None:
        self._tolerance = tolerance
        self._slack = slack
        self._rows: tuple[tuple[int, ...], ...] = ()
        self._references: dict[str, Measured] = {}

    def needs_base(self, probe: ReceivedProbe) -> bool:
        """Tell whether these tokens were never measured with the engine's base."""
        return self._rows != probe.rows

    def note_base(self, probe: ReceivedProbe, engine: Sequence[Scored] | None) -> None:
        """Begin with these tokens, and with what the engine's base computes of them (None: it is not there any more)."""
        self._rows, self._references = probe.rows, {}
        if engine is not None:
            self._references["base"] = _measured(probe.base, probe.exact_base, engine, probe)

    def verdict(self, probe: ReceivedProbe, engine: Sequence[Scored]) -> Verdict:
        """Judge a version that the trainer measured, by what the engine computes of its tokens."""
        assert probe.policy is not None
        version = _measured(probe.policy, probe.exact, engine, probe)
        found = {name: compare(version, reference, self._slack) for name, reference in self._references.items()}
        refusal = self._refusal(version, found, list(self._references.values())) or _stale(version, engine)
        if not refusal and all(one.share <= _PROVES for one in found.values()):
            self._references["before"] = version
        return Verdict(refusal, rms(version.engine - version.trainer), found)

    def unlike(self, one: Scored, other: Scored, bases: tuple[Scored, Scored] | None) -> str:
        """Describe how a row that one engine computed differs from what another one did; "" if it does not.

        Args:
            bases: the row without an adapter, by both engines.
        """
        version = Measured(_joined([other]), None, _joined([one]))
        known = [] if bases is None else [Measured(_joined([bases[1]]), None, _joined([bases[0]]))]
        found = dict(zip(("base",), (compare(version, base, self._slack) for base in known), strict=False))
        return self._refusal(version, found, known) or _stale(version, [one])

    def change(self, before: Sequence[Scored], after: Sequence[Scored]) -> str:
        """Describe how far log-probs differ from those before; "" if they do not."""
        difference = rms(_joined(before) - _joined(after))
        if difference <= _SAME * self._tolerance:
            return ""
        return f"log-probs of the same tokens differ by {difference:.2g} from before"

    def _refusal(self, version: Measured, found: dict[str, Comparison], references: list[Measured]) -> str:
        difference = rms(version.engine - version.trainer)
        if not difference <= self._tolerance:  # a NaN, too
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


def _stale(version: Measured, engine: Sequence[Scored]) -> str:
    """Compare tokens that were sampled as rollouts are, with the prefix cache, with the same ones scored without it."""
    apart = [one - other for row in engine for one, other in zip(row.sampled, row.rescored, strict=True)]
    found = rms(np.array(apart)) if apart else 0.0
    if found <= _LOUD * version.noise:
        return ""
    return (
        f"log-probs of sampled tokens differ by {found:.2g} from those that the engine computes of them without its prefix "
        f"cache, where {version.noise:.2g} is usual: it serves keys and values of another version"
    )


def _measured(trainer: Numbers, exact: Numbers | None, engine: Sequence[Scored], probe: ReceivedProbe) -> Measured:
    """Take of each row as many tokens as the engine scored: its longest sequence may be shorter than a row."""
    length = len(probe.rows[0]) - 1
    scored = [len(row.logprobs) for row in engine]
    kept = np.concatenate([np.arange(count) + length * number for number, count in enumerate(scored)])
    return Measured(trainer[kept], None if exact is None else exact[kept], _joined(engine))


def _joined(rows: Sequence[Scored]) -> Numbers:
    return np.concatenate([np.asarray(row.logprobs, np.float64) for row in rows])


def rms(numbers: Numbers) -> float:
    """Return the root mean square; NaN if one is."""
    return float(np.sqrt(np.mean(numbers**2)))
