"""How many connections a trainer takes, by the descriptors that its host allows."""

import logging
import resource

import pytest

from protocol.transport.watched_connection import ConnectionLimits, limits, raise_descriptor_limit


@pytest.mark.parametrize(
    ("descriptors", "connections", "unfinished"),
    [
        (256, 64, 64),  # too few for anything; refusing everybody would help nobody
        (1024, 256, 64),
        (20_000, 9744, 1024),
        (65_536, 32_512, 1024),
    ],
)
def test_each_connection_takes_two_descriptors_and_512_are_for_the_rest(
    descriptors: int, connections: int, unfinished: int
) -> None:
    assert limits(descriptors) == ConnectionLimits(connections, unfinished)


@pytest.mark.parametrize(
    ("soft", "hard", "sure", "warning"),
    [
        (1024, 1024, 1024, "may open 1024 files, so at most 128 producers can connect: raise the hard limit"),
        (1024, 20_000, 20_000, None),
        (1024, resource.RLIM_INFINITY, 65_536, None),
        (200_000, 200_000, 200_000, None),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes_and_too_low_a_one_is_said(
    soft: int, hard: int, sure: int, warning: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: now.append(limit))
    with caplog.at_level(logging.WARNING):
        assert raise_descriptor_limit() == sure
    assert now[-1] == (sure, hard)
    assert [message for message in caplog.messages if warning is None or warning not in message] == []
    assert bool(caplog.messages) == (warning is not None)
