"""Swaps that are right pass, whatever the noise; swaps that are not are found out. Two tokens are judged, by hand."""

import struct

import pytest

from producer.policies.probe import Probe, SwapProof, probe_of
from protocol.wire.messages import PolicyOffer

SHA = "a" * 64


def probe(*logprobs: float) -> Probe:
    return Probe((5, 6, 7), logprobs)


def test_log_probs_within_the_tolerance_pass_and_others_do_not():
    proof = SwapProof(tolerance=0.01)
    assert proof.refusal(probe(-1.0, -2.0), [-1.009, -2.0]) == ""
    assert "differ by 0.011 from the trainer's, more than swap.probe_tolerance (0.01)" in (
        proof.refusal(probe(-1.0, -2.0), [-1.0, -2.011])
    )


@pytest.mark.parametrize("engine", [[float("nan"), -2.0], [-1.0, float("nan")]])
def test_what_is_not_a_number_does_not_pass(engine):
    assert "differ by nan" in (SwapProof(1.0).refusal(probe(-1.0, -2.0), engine))


def test_an_engine_that_stays_where_it_was_is_found_out_once_the_trainer_has_clearly_moved():
    proof = SwapProof(tolerance=0.5)
    stuck = [-1.001, -2.0]  # 0.001 apart, so the trainer must have moved by more than 0.004
    assert proof.refusal(probe(-1.0, -2.0), stuck) == ""
    assert proof.refusal(probe(-1.0, -2.002), stuck) == ""
    assert proof.refusal(probe(-1.0, -2.0039), stuck) == "", "small moves add up"
    almost_stuck = [-1.001, -2.0004]
    for engine in (stuck, almost_stuck):
        refusal = proof.refusal(probe(-1.0, -2.005), engine)
        assert "the swap changed nothing: the trainer's log-probs of the probe have moved by 0.005" in refusal
    assert proof.refusal(probe(-1.0, -2.005), [-1.001, -2.0045]) == "", "this one follows"


def test_after_a_version_that_was_followed_the_next_is_compared_with_that():
    proof = SwapProof(tolerance=0.5)
    assert proof.refusal(probe(-1.0, -2.0), [-1.0, -2.0]) == ""
    assert proof.refusal(probe(-1.0, -3.0), [-1.0, -3.02]) == ""
    assert proof.refusal(probe(-1.0, -3.08), [-1.0, -3.02]) == "", "no clear move: they were 0.02 apart"
    assert "the engine's by 0" in (proof.refusal(probe(-1.0, -3.081), [-1.0, -3.02]))
    assert "the engine's by 0" in (proof.refusal(probe(-1.0, -2.9), [-1.0, -3.02])), "going back is moving, too"


def test_another_probe_is_not_compared_with_the_one_before_and_one_that_stays_passes():
    proof = SwapProof(tolerance=0.5)
    for _ in range(3):
        assert proof.refusal(probe(-1.0, -2.0), [-1.0, -2.0]) == "", "an untrained adapter changes nothing"
    assert proof.refusal(Probe((5, 6, 8), (-1.0, -2.1)), [-1.0, -2.0]) == ""


def test_an_engine_that_slept_computes_what_it_did_before():
    proof = SwapProof(tolerance=0.01)
    assert proof.change([-1.0, -2.0], [-1.0009, -2.0]) == ""
    assert "differ by 0.0011 from before" in proof.change([-1.0, -2.0], [-1.0, -2.0011])
    assert "differ by nan" in proof.change([-1.0, -2.0], [-1.0, float("nan")])


def test_a_probe_travels_as_plain_numbers():
    offer = PolicyOffer(SHA, "", struct.pack("<3i", 0, 6, 7), struct.pack("<2f", -1.5, -0.25))
    assert probe_of(offer) == ((0, 6, 7), (-1.5, -0.25))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        (b"", b""),
        (bytes(4), b""),
        (bytes(7), bytes(3)),
        (bytes(8), bytes(8)),
        (bytes(8), b""),
        (struct.pack("<2i", 3, -1), bytes(4)),
    ],
)
def test_a_probe_that_makes_no_sense_is_none(ids, logprobs):
    assert probe_of(PolicyOffer(SHA, "", ids, logprobs)) is None
