"""The proof by behaviour: numbers by hand, right swaps under any noise, and each fault above the resolution that is said."""

import math
import struct
from typing import Any

import numpy as np
import pytest

from producer.engine_contract import Scored
from producer.metrics import Comparison
from producer.policies.probe import Measured, ReceivedProbe, SwapProof, compare, probe_of
from protocol.wire.messages import PolicyOffer, Probe
from tests.policies import received_probe

SHA = "a" * 64
N = 286
ROW = tuple(range(N + 1))


def measured(trainer: Any, engine: Any, exact: Any = None) -> Measured:
    return Measured(
        np.asarray(trainer, float), None if exact is None else np.asarray(exact, float), np.asarray(engine, float)
    )


# One comparison.


def test_a_comparison_by_hand() -> None:
    """100 tokens move by 1 nat up or down, so c = 1, c g = ±1/2 and Σ c g dt = 50. The engine follows half of it: d = -dt / 2,
    Σ c g d = -25 and √Σ (c g d)² = 2.5. With a slack of 0.05 the bound is 0.05 + 5 * 2.5 / 50, and the least lack that would be
    refused is q with (q - 0.05) 50 = 5 q √Σ (c g dt)² = 25 q."""
    x = np.tile([1.0, -1.0], 50)
    zero = np.zeros(100)
    found = compare(measured(x, x / 2, x), measured(zero, zero, zero), slack=0.05)
    assert found == pytest.approx(Comparison(moved=1.0, noise=0.5, lack=0.5, bound=0.3, share=0.1))
    assert found.is_refused


def test_what_did_not_move_shows_nothing() -> None:
    zero = np.zeros(N)
    found = compare(measured(zero, zero + 0.1), measured(zero, zero), 0.05)
    assert (found.lack, found.bound, found.share, found.is_refused) == (0.0, math.inf, math.inf, False)


def test_the_trainers_own_noise_is_no_lack_of_the_engine() -> None:
    """Nothing but rounding moves, and each side rounds on its own: without float32 arithmetic that looks like a lack."""
    chance = np.random.default_rng(0)
    for _ in range(300):
        base, version = (measured(*(0.03 * chance.standard_normal((2, N)))) for _ in range(2))
        assert not compare(version, base, 0.05).is_refused


NOISES = {
    "normal": lambda chance: chance.standard_normal(N),
    "heavy tails": lambda chance: chance.standard_t(2, N),
    "of very different tokens": lambda chance: (
        chance.standard_normal(N) * np.exp(1.5 * chance.standard_normal(N) - 2.25)
    ),
}


def versions(chance: np.random.Generator, noise: Any, moved: float) -> tuple[Measured, Measured, Any]:
    """The base, a version and the change between them; engine and trainer have 0.05 nats of noise each, float32 has none."""
    change = moved * chance.standard_t(3, N) / math.sqrt(3)
    base = measured(0.05 * noise(chance), 0.05 * noise(chance), np.zeros(N))
    return base, measured(change + 0.05 * noise(chance), change + 0.05 * noise(chance), change), change


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("moved", [1e-4, *(pytest.param(each, marks=pytest.mark.long) for each in (0.01, 0.1)), 1.0])
def test_right_swaps_are_never_refused(noise: Any, moved: float) -> None:
    chance = np.random.default_rng(1)
    for _ in range(200):
        base, version, _ = versions(chance, noise, moved)
        assert not compare(version, base, 0.05).is_refused


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "lack"), [(noise, lack) for noise in NOISES for lack in (1.0, 0.5, -1.0)] + [("normal", 0.2)]
)
def test_a_lack_above_the_share_that_is_said_is_refused(noise: str, lack: float) -> None:
    chance = np.random.default_rng(2)
    refused, visible = 0, 0
    for moved in np.repeat([0.05, 0.2, 0.8], 60):
        base, version, change = versions(chance, NOISES[noise], moved)
        share = compare(version, base, 0.05).share
        faulty = version._replace(engine=version.engine - lack * change)
        if abs(lack) > 1.2 * share:
            visible += 1
            refused += compare(faulty, base, 0.05).is_refused
    assert visible >= 30
    assert refused >= 0.97 * visible


# Version after version.


def scored(logprobs: Any, *, stale: float = 0.0) -> list[Scored]:
    return [Scored(list(logprobs), [-1.0, -2.0], [-1.0 + stale, -2.0])]


class Run:
    """A policy that moves in one direction, step by step, in an engine with noise of bfloat16."""

    def __init__(self, seed: int, step: float, tolerance: float = 0.5) -> None:
        self.chance = np.random.default_rng(seed)
        self.base, self.step = -2 * self.chance.random(N), step
        self.directions = self.chance.standard_normal((200, N))
        self.proof = SwapProof(tolerance)
        self.probe = ReceivedProbe((ROW,), self.noisy(self.base), self.base, None, None)
        assert self.proof.needs_base(self.probe)
        self.proof.note_base(self.probe, scored(self.noisy(self.base)))
        assert not self.proof.needs_base(self.probe)

    def noisy(self, values: Any) -> Any:
        return values + 0.03 * self.chance.standard_normal(N)

    def at(self, version: int) -> Any:
        return self.base + self.step * self.directions[:version].sum(0) + version * self.step * self.directions[199]

    def refusal(self, version: int, served: Any, **named: float) -> str:
        exact = self.at(version)
        probe = self.probe._replace(policy=self.noisy(exact), exact=exact)
        return self.proof.verdict(probe, scored(self.noisy(served), **named)).refusal


@pytest.mark.long
def test_two_hundred_right_swaps_pass() -> None:
    for step in (1e-3, 0.03):
        run = Run(3, step)
        assert [run.refusal(version, run.at(version)) for version in range(1, 100)] == [""] * 99


@pytest.mark.parametrize("step", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("fault", ["the base", "stuck", "half"])
def test_a_fault_is_refused_once_it_is_large_enough(step: float, fault: str) -> None:
    run = Run(4, step)
    for version in range(1, 11):
        assert run.refusal(version, run.at(version)) == ""
    found = next(
        version
        for version in range(11, 100)
        if run.refusal(
            version,
            {"the base": run.base, "stuck": run.at(10), "half": (run.at(version) + run.base) / 2}[fault],
        )
    )
    assert found <= {0.003: 60, 0.03: 14, 0.1: 12}[step]


def test_an_engine_that_went_elsewhere_is_refused_for_what_it_does() -> None:
    run = Run(5, 0.1)
    assert run.refusal(1, run.at(1)) == ""
    elsewhere = run.at(2) + 0.5 * run.chance.standard_normal(N)
    assert "moved otherwise than the trainer's" in run.refusal(2, elsewhere)


def test_keys_and_values_of_another_version_are_refused() -> None:
    run = Run(6, 0.03)
    assert run.refusal(1, run.at(1), stale=0.05) == "", "that is the noise of this format"
    assert "serves keys and values of another version" in run.refusal(2, run.at(2), stale=1.0)


@pytest.mark.parametrize(
    ("cached", "is_refused"), [((0, 0), False), ((0, 32), False), ((32, 0), False), ((0, 48), True), ((16, 64), True)]
)
def test_the_first_request_of_a_version_finds_no_more_than_its_own_rows_share(cached: Any, is_refused: bool) -> None:
    """Two rows of 50 tokens begin with the same 33, which are two blocks of 16. Nothing moved, so that log-probs show nothing."""
    rows, base = (tuple(range(50)), (*range(33), *range(100, 117))), np.zeros(98)
    probe, proof = ReceivedProbe(rows, base, None, base, None), SwapProof(0.5)
    engine = [Scored([0.0] * 49, [-1.0], [-1.0], found) for found in cached]
    proof.note_base(probe, [one._replace(cached=50) for one in engine])
    assert ("of another version" in proof.verdict(probe, engine).refusal) == is_refused


@pytest.mark.parametrize("value", [math.nan, 5.0])
def test_what_is_far_from_the_trainer_or_no_number_is_refused_at_once(value: float) -> None:
    run = Run(7, 0.03)
    served = run.at(1)
    served[3:40] += value
    assert "more than swap.probe_tolerance (0.5)" in run.refusal(1, served)


def test_without_the_base_the_first_version_is_the_reference() -> None:
    proof, base = SwapProof(0.5), -np.linspace(0, 1, N)
    first = received_probe(ROW, base, base + 0.1)
    proof.note_base(first, None)
    assert proof.verdict(first, scored(base + 0.1)).comparisons == {}
    move = np.tile([0.1, -0.1], N // 2)
    second = first._replace(policy=base + 0.1 + move)
    assert "since an earlier version" in proof.verdict(second, scored(base + 0.1)).refusal
    assert proof.verdict(second, scored(base + 0.1 + move)).refusal == ""


def test_an_engine_that_takes_shorter_rows_is_judged_by_what_it_takes() -> None:
    proof, base = SwapProof(1e-3), np.zeros(N)
    proof.note_base(received_probe(ROW, base, None), scored(base[:20]))
    policy = np.linspace(-1, 1, N)
    assert proof.verdict(received_probe(ROW, base, policy), scored(policy[:20])).refusal == ""
    assert proof.verdict(received_probe(ROW, base, policy), scored(base[:20])).refusal != ""


def test_another_engine_must_compute_the_same() -> None:
    chance = np.random.default_rng(8)
    base, policy = -chance.random(N), -chance.random(N)
    one, other = scored(policy)[0], scored(policy + 1e-6 * chance.standard_normal(N))[0]
    bases = scored(base)[0], scored(base)[0]
    proof = SwapProof(2e-3)
    assert proof.unlike(one, other, bases, [ROW]) == proof.unlike(one, other, None, [ROW]) == ""
    assert proof.unlike(scored(base)[0], other, None, [ROW]) != ""
    assert SwapProof(100.0).unlike(scored(base)[0], other, bases, [ROW]) != "", "it serves its base"
    assert "found 16 tokens in the engine's prefix cache" in proof.unlike(one._replace(cached=16), other, bases, [ROW])


def test_an_engine_that_slept_computes_what_it_did_before() -> None:
    proof, before = SwapProof(0.01), [Scored([-1.0, -2.0])]
    assert proof.change(before, [Scored([-1.0009, -2.0009])]) == ""
    assert "differ by 0.0011 from before" in proof.change(before, [Scored([-1.0011, -2.0011])])
    assert "differ by nan" in proof.change(before, [Scored([-1.0, math.nan])])


# The wire.


def test_a_probe_travels_as_plain_numbers() -> None:
    ids, half = struct.pack("<4i", 0, 6, 7, 8), struct.pack("<2f", -0.5, -1.5)
    found = probe_of(PolicyOffer(SHA, "", Probe(ids, 2, half, policy=half)))
    assert found is not None
    assert (found.rows, found.base.tolist(), found.exact_base, found.exact) == (
        ((0, 6), (7, 8)),
        [-0.5, -1.5],
        None,
        None,
    )
    assert found.policy is not None
    assert found.policy.tolist() == [-0.5, -1.5]


@pytest.mark.parametrize(
    "probe",
    [
        None,
        Probe(b"", 2, b""),
        Probe(bytes(12), 2, bytes(4)),
        Probe(bytes(7), 2, bytes(4)),
        Probe(bytes(8), 2, bytes(8)),
        Probe(struct.pack("<2i", 3, -1), 2, bytes(4)),
    ],
)
def test_a_probe_that_makes_no_sense_is_none(probe: Probe | None) -> None:
    assert probe_of(PolicyOffer(SHA, "", probe)) is None
