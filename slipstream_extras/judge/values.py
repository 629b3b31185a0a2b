"""The values that a program and its judge exchange, as JSON; decoding them executes nothing.

Guarantee: `decode` makes plain values of any bytes, or what `resolve` makes of a reference, or raises. Plain are numbers, text,
bytes, None, the built-in containers, and the values of `_KINDS`. Numbers and texts of other classes are sent as their base class,
so that a class of the program's own does not decide how they compare.

This runs in the sandboxes: it imports nothing but the standard library.
"""

import collections
import datetime
import decimal
import fractions
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

_MAX_BYTES = 2**26
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_BASES = (bool, int, float, str, bytes, list, dict, set, frozenset)
_KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], complex),
    "bytes": (bytes, lambda value: [value.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda value: [value.hex()], bytearray.fromhex),
    "range": (range, lambda value: [value.start, value.stop, value.step], range),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], slice),
    "deque": (collections.deque, lambda value: [list(value), value.maxlen], collections.deque),
    "Decimal": (decimal.Decimal, lambda value: [str(value)], decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda value: [value.numerator, value.denominator], fractions.Fraction),
    "datetime": (datetime.datetime, lambda value: [value.isoformat()], datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value: [value.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda value: [value.isoformat()], datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        datetime.timedelta,
    ),
}
_SHARED_MODULES = {
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math",
    "random", "re", "statistics", "string",
}  # fmt: skip
_SHARED_TYPES = {("builtins", kind.__name__) for kind in (*_BASES, tuple, complex, bytearray, object)}
_TAGS = {kind: tag for tag, (kind, _, _) in _KINDS.items()}


class ChannelEndedError(BaseException):
    """The other side has ended, or sent an invalid message."""


class Peer:
    """A side of the channel, with lines of JSON over a socket's descriptor. `refer` returns the reference to a value that is not
    plain, a list that begins with a tag, or raises. `resolve` returns the meaning of such a reference from the other side."""

    refer: Callable[[Any], list[Any]]
    resolve: Callable[[list[Any]], Any]

    def __init__(self, descriptor: int) -> None:
        self._reader = os.fdopen(descriptor, "rb")
        self._writer = os.fdopen(os.dup(descriptor), "wb")

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError as error:
            raise ChannelEndedError(str(error)) from None

    def receive(self) -> dict[str, Any]:
        try:
            message = json.loads(self._reader.readline(_MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ChannelEndedError(str(error)) from None
        if not isinstance(message, dict):
            raise ChannelEndedError("it sent no message")
        return message

    def ask(self, message: dict[str, Any], request: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        """Send `message`, answer requests of the other side, which have the key `request`, and return its answer."""
        self.send(message)
        while request in (found := self.receive()):
            self.send(answer(found))
        return found

    def encode(self, value: Any) -> Any:
        """Return `value` as JSON."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else ["int", hex(value)]  # decimal digits of more are refused by Python
        if kind in _CONTAINERS.values():
            return [kind.__name__, self._encode_all(value)]
        if kind is dict:
            return ["dict", [self._encode_all(pair) for pair in value.items()]]
        if kind in _TAGS:
            return [_TAGS[kind], self._encode_all(_KINDS[_TAGS[kind]][1](value))]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return ["numpy", str(value.dtype), self.encode(value.tolist())]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", kind.__name__, list(value._fields), self._encode_all(value)]
        base = next((base for base in _BASES if isinstance(value, base)), None)
        if base is not None and (kind.__module__ != "__main__" or base in (int, float, str)):
            return self.encode(base(value))
        return self.refer(value)

    def _encode_all(self, values: Iterable[Any]) -> list[Any]:
        return [self.encode(value) for value in values]

    def decode(self, data: Any) -> Any:
        """Return the value that `encode` has encoded."""
        if not isinstance(data, list):
            return data
        tag = data[0]
        if tag == "int":
            return int(data[1], 16)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](map(self.decode, data[1]))
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in data[1]}
        if tag in _KINDS:
            return _KINDS[tag][2](*map(self.decode, data[1]))
        if tag == "numpy":
            import numpy

            return numpy.array(self.decode(data[2]), dtype=data[1])[()]
        if tag == "namedtuple":
            return collections.namedtuple(data[1], data[2])(*map(self.decode, data[3]))
        return self.resolve(data)


def importable(value: Any) -> list[Any] | None:
    """Return the reference to a module, or a class or function of one, which the other side can import by itself."""
    if isinstance(value, type(sys)):
        return ["import", value.__name__, ""]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return ["import", module, name] if getattr(sys.modules.get(module), name, None) is value else None


def imported(reference: list[Any]) -> Any:
    _, module, name = reference
    __import__(module)
    return getattr(sys.modules[module], name) if name else sys.modules[module]


def is_shared(reference: list[Any] | None) -> bool:
    """Return whether the judge may import this for the program: only names that execute no text."""
    if reference is None or reference[1].partition(".")[0] not in sys.stdlib_module_names:
        return False
    _, module, name = reference
    if not name:
        return module in _SHARED_MODULES
    found = imported(reference)
    is_known = module in _SHARED_MODULES or (module, name) in _SHARED_TYPES
    return isinstance(found, type) and (is_known or issubclass(found, BaseException))
