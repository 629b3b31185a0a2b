"""How many connections a trainer takes, by the descriptors that its host allows."""

import logging
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.channel.connection_quota import ConnectionLimits, ConnectionQuota, limits, raise_descriptor_limit


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (256, (64, 64, 60, 48)),  # too few for anything; refusing everybody would help nobody
        (1024, (256, 64, 240, 192)),
        (20_000, (9744, 1024, 9135, 7308)),
        (65_536, (32_512, 1024, 30_480, 24_384)),
    ],
)
def test_each_connection_takes_two_descriptors_and_512_are_for_the_rest(
    descriptors: int, expected: tuple[int, ...]
) -> None:
    assert limits(descriptors) == ConnectionLimits(*expected)


LIMITS = ConnectionLimits(connections=16, unfinished=6, finished=12, of_one_key=8)


def test_one_key_has_a_part_of_all_places() -> None:
    quota = ConnectionQuota[int](LIMITS)
    for number in range(8):
        quota.finish(number)
        assert quota.on_first_message(number, b"a")
    assert not quota.on_first_message(8, b"a")
    assert quota.on_first_message(9, b"b"), "another one"
    for number in (8, 3, 3):  # an end is told twice of who had to go
        quota.end(number)
    assert quota.on_first_message(10, b"a"), "one has left"
    assert quota.on_first_message(9, b"b"), "its descriptor was used again"
    assert not quota.on_first_message(9, b"a")


def test_who_has_said_nothing_for_longest_goes_first_and_then_the_newest() -> None:
    quota = ConnectionQuota[int](LIMITS)
    for number in range(12):
        quota.finish(number)
        if number in (1, 2, 4):
            quota.on_first_message(number, b"a")
            quota.finish(number)  # both may be seen in any order
    assert quota.take_surplus() == []
    quota.finish(12)
    quota.finish(13)
    assert quota.take_surplus() == [0, 3]
    assert quota.take_surplus() == []
    for number in range(20, 32):
        quota.on_first_message(number, b"b")
    assert quota.take_surplus() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 31, 30, 29]


def test_half_of_what_is_free_stays_free_of_unfinished_handshakes() -> None:
    quota = ConnectionQuota[int](LIMITS)
    found = []
    for number in range(12):
        found.append(quota.most_unfinished)
        quota.finish(number)
    assert found == [6, 6, 6, 6, 6, 5, 5, 4, 4, 3, 3, 2]
    assert quota.most_unfinished == 2


@pytest.mark.long
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["finish", "speak", "end", "check"]), st.integers(0, 9), st.sampled_from([b"a", b"b"])
        )
    )
)
def test_what_is_counted_is_what_is_there(events: list[tuple[str, int, bytes]]) -> None:
    quota, users = ConnectionQuota[int](ConnectionLimits(8, 4, 5, 3)), dict[int, bytes | None]()
    for event, number, user in events:
        match event:
            case "finish":
                quota.finish(number)
                users.setdefault(number, None)
            case "speak":
                users[number] = user
                assert quota.on_first_message(number, user) == (list(users.values()).count(user) <= 3)
            case "end":
                quota.end(number)
                users.pop(number, None)
            case _:
                gone = quota.take_surplus()
                assert len(gone) == max(0, len(users) - 5)
                for key in gone:
                    del users[key]
        assert quota.most_unfinished == max(1, min(4, (8 - len(users)) // 2))


@pytest.mark.parametrize(
    ("soft", "hard", "sure", "warning"),
    [
        (1024, 1024, 1024, "may open 1024 files, so at most 120 producers can connect: raise the hard limit"),
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
