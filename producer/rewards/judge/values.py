"""The values that a program and its judge exchange, as JSON; reading them runs nothing.

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
from collections.abc import Callable
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
    """The other side has ended, or sends what makes no sense."""


class Channel:
    """Lines of JSON over a socket's descriptor."""

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


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Returns `value` as JSON. `refer` gives the reference to a value that is not plain, or raises."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < 2**63 else ["int", hex(value)]  # decimal digits of more are refused by Python
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return [kind.__name__, [encode(item, refer) for item in value]]
    if kind is dict:
        return ["dict", [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    if kind in _TAGS:
        tag = _TAGS[kind]
        return [tag, [encode(item, refer) for item in _KINDS[tag][1](value)]]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return ["numpy", str(value.dtype), encode(value.tolist(), refer)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["namedtuple", kind.__name__, list(value._fields), [encode(item, refer) for item in value]]
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is not None and (kind.__module__ != "__main__" or base in (int, float, str)):
        return encode(base(value), refer)
    return refer(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """Returns what `encode` was given. `resolve` gets a list that begins with the tag of a reference."""
    if not isinstance(data, list):
        return data
    tag = data[0]
    if tag == "int":
        return int(data[1], 16)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(item, resolve) for item in data[1])
    if tag == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in data[1]}
    if tag in _KINDS:
        return _KINDS[tag][2](*(decode(item, resolve) for item in data[1]))
    if tag == "numpy":
        import numpy

        return numpy.array(decode(data[2], resolve), dtype=data[1])[()]
    if tag == "namedtuple":
        return collections.namedtuple(data[1], data[2])(*(decode(item, resolve) for item in data[3]))
    return resolve(data)


def importable(value: Any) -> list[Any] | None:
    """The reference to what the other side can import by itself: modules, and classes and functions of modules."""
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
    """Whether the judge may import this for the program: only what runs no text that it is given."""
    if reference is None or reference[1].partition(".")[0] not in sys.stdlib_module_names:
        return False
    _, module, name = reference
    if not name:
        return module in _SHARED_MODULES
    found = imported(reference)
    is_known = module in _SHARED_MODULES or (module, name) in _SHARED_TYPES
    return isinstance(found, type) and (is_known or issubclass(found, BaseException))
