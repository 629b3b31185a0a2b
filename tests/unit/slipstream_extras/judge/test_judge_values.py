"""Values between a program and its judge: plain ones come back as they were, and no reference makes the judge run anything."""

import builtins
import collections
import datetime
import decimal
import json
import os
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_extras.judge.values import Peer, importable, imported, is_shared

KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.dates(), st.tuples(st.integers(), st.text())
)
PLAIN = st.recursive(
    KEYS
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS) | st.tuples(inner, inner),
    max_leaves=20,
)


class Plain(Peer):
    """One side that has no references, and no channel."""

    def __init__(self) -> None: ...

    def refer(self, value: Any) -> NoReturn:
        raise TypeError(f"not plain: {value!r}")

    resolve = refer


PEER = Plain()


@pytest.mark.long
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = PEER.decode(json.loads(json.dumps(PEER.encode(value))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [object(), len, lambda: 1, iter([]), os, KeyError("x"), int])
def test_what_is_not_plain_is_referred_to(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain"):
        PEER.encode([value])


def test_values_of_other_classes_travel_as_what_they_are_based_on() -> None:
    class Mine(float):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = float.__hash__

    assert PEER.encode([Mine(1.5), collections.Counter("aab")]) == ["list", [1.5, ["dict", [["a", 2], ["b", 1]]]]]
    kind = collections.namedtuple("kind", "x y")
    point = kind(1, [2])
    assert PEER.decode(PEER.encode(point)) == point


@pytest.mark.parametrize("value", [int, KeyError, json.JSONDecodeError, collections.Counter, datetime.date, decimal])
def test_what_the_judge_may_import(value: Any) -> None:
    reference = importable(value)
    assert reference is not None
    assert is_shared(reference)
    assert imported(reference) is value


@pytest.mark.parametrize(
    "value", [os._exit, os, exec, type, builtins, collections.namedtuple, importable, os.popen, len]
)
def test_what_the_judge_may_not_import(value: Any) -> None:
    assert not is_shared(importable(value))
