"""Environments share the engine by their weights, and those that are gone do not keep theirs."""

from typing import Any

import pytest

from slipstream_extras.endpoint.atropos.atropos import Environments
from slipstream_extras.endpoint.atropos.bodies import Registration
from slipstream_extras.endpoint.openai import RefusedError, decode_body


def registration(weight: float = 1.0, length: float = 64) -> Registration:
    return Registration(group_size=2, max_token_length=length, weight=weight)


def test_shares_go_by_weight_among_those_that_were_heard_lately():
    now = [0.0]
    environments = Environments(lambda: now[0])
    one, three, none = (environments.add(registration(weight)) for weight in (1.0, 3.0, -1.0))
    assert [environments.share_of(number) for number in (one, three, none)] == [0.25, 0.75, 0.01]
    unknown: list[Any] = [77, None, True, [], "0"]
    assert [environments.share_of(number) for number in unknown] == [1.0] * 5
    now[0] = 59.0
    assert environments.share_of(one) == 0.25
    now[0] = 61.0  # the other one died, and another took its place
    again = environments.add(registration(1.0))
    assert environments.share_of(again) == environments.share_of(one) == 0.5
    assert environments.remove(again)
    assert not environments.remove(again)
    assert environments.share_of(one) == 1.0


def test_the_one_that_was_silent_for_longest_makes_room():
    now = [0.0]
    environments = Environments(lambda: now[0])
    numbers = [environments.add(registration()) for _ in range(256)]
    now[0] = 1.0
    environments.share_of(numbers[0])
    last = environments.add(registration())
    assert not environments.remove(numbers[1])
    assert environments.remove(numbers[0])
    assert environments.remove(last)


@pytest.mark.parametrize("length", [b"1e999", b"1" + b"0" * 400, b'"64"', b"null"])
def test_what_is_no_registration_is_refused(length: bytes):
    body = b'{"group_size": 2, "max_token_length": %b, "weight": 1}'
    assert decode_body(body % b"64", Registration, "a registration").group_size == 2
    with pytest.raises(RefusedError, match="the body is not a registration"):
        decode_body(body % length, Registration, "a registration")
