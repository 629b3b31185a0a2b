"""Valid frames, and the ways to spoil one.

Guarantee: `mutant(number)` is a function of the corpus, the seed and the number alone, so that any frame of a campaign
can be made again without the others.
"""

import math
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from protocol.wire import messages as m
from protocol.wire.codec import PREFIX_BYTES, SCHEMA_VERSION, encode
from tests.unit.protocol.samples import SAMPLES, SHA, body_of

MAX_FRAME_BYTES = 65_536
CLAIMS = (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
STRANGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**31 + 1, 2**53, 2**53 + 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e-320, 1e308),
    *(math.nan, math.inf, -math.inf, "", "\0", "../" * 20, "x" * 128, "x" * 129, SHA, SHA + "\n", b"", b"\xff"),
    *([], {}, [[]], {"": None}, [None] * 20, {str(i): i for i in range(20)}, {i: i for i in range(20)}, {1: {2: 3}}),
    *(Ext(5, b"x"), Ext(-1, b"\xff" * 12), Ext(-1, bytes(4)), {b"k": 1}),
)

# format: [header byte, bytes of its length field], from the shortest on; the fix formats carry theirs in the header
_HEADERS = {
    "str": ((0xD9, 1), (0xDA, 2), (0xDB, 4)),
    "bin": ((0xC4, 1), (0xC5, 2), (0xC6, 4)),
    "array": ((0xDC, 2), (0xDD, 4)),
    "map": ((0xDE, 2), (0xDF, 4)),
    "ext": ((0xC7, 1), (0xC8, 2), (0xC9, 4)),
}
_FIX = {"str": (0xA0, 31), "array": (0x90, 15), "map": (0x80, 15)}


@dataclass(frozen=True)
class Seed:
    """A valid frame, and where its body's length fields are: (start, end, kind)."""

    message: m.Message
    frame: bytes
    headers: tuple[tuple[int, int, str], ...]

    @property
    def body(self) -> bytes:
        return self.frame[PREFIX_BYTES:]


@dataclass(frozen=True)
class Mutant:
    frame: bytes
    mutation: str
    resealed: bool


def sealed(body: bytes, version: int = SCHEMA_VERSION) -> bytes:
    """A frame with a correct prefix around any body: what a peer with a bug, or malice, can send."""
    prefix = struct.pack("<2sH", b"SL", version)
    return prefix + struct.pack("<I", zlib.crc32(body, zlib.crc32(prefix))) + body


def header(kind: str, length: int, field_bytes: int) -> bytes:
    """The header of `length` elements with the shortest length field of at least `field_bytes` that holds it."""
    if field_bytes == 0 and kind in _FIX and length <= _FIX[kind][1]:
        return bytes([_FIX[kind][0] + length])
    for code, width in _HEADERS[kind]:
        if width >= field_bytes and length < 1 << 8 * width:
            return bytes([code]) + length.to_bytes(width, "big")
    raise AssertionError(f"{length} is too long for msgpack")


def headers_of(body: bytes) -> Iterator[tuple[int, int, str]]:
    """The length fields of a valid body."""
    fixed = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, **{0xCC + i: 1 << i for i in range(4)}}
    fixed |= {0xD0 + i: 1 << i for i in range(4)} | {0xD4 + i: 1 + (1 << i) for i in range(5)}
    position = 0
    while position < len(body):
        first, start = body[position], position
        position += 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first in fixed:
            position += fixed[first]
            continue
        kind, length = next(
            ((kind, first - low) for kind, (low, most) in _FIX.items() if low <= first <= low + most), ("", 0)
        )
        for name, codes in _HEADERS.items():
            for code, width in codes:
                if first == code:
                    kind, length = name, int.from_bytes(body[position : position + width], "big")
                    position += width
        yield start, position, kind
        position += {"str": length, "bin": length, "ext": 1 + length}.get(kind, 0)


def corpus() -> list[Seed]:
    """One small frame of every type, and the large and the nested ones that small samples do not show."""
    lease = next(message for message in SAMPLES if isinstance(message, m.Lease))
    group = next(message for message in SAMPLES if isinstance(message, m.Group))
    nested: Any = "leaf"
    for depth in range(12):
        nested = {"k": nested} if depth % 2 else [nested, depth]
    extra = [
        msgspec.structs.replace(lease, columns={f"c{i}": value for i, value in enumerate(STRANGE_VALUES[:30])}),
        msgspec.structs.replace(lease, prompt="\u07df\xdf" * 40, columns={"nested": nested, "floats": [0.5] * 40}),
        msgspec.structs.replace(
            lease, columns={"wide": {f"key {i}": {"large": {str(i): i for i in range(20)}} for i in range(20)}}
        ),
        msgspec.structs.replace(group, completion_ids=bytes(8000), logprobs=bytes(8000)),
        m.Heartbeat(
            policy_version=3, capacity=512, held=[f"{i}.0" for i in range(512)], tokens_generated=2**53, busy_s=1e9
        ),
        m.Reject(problems=["x" * 300, "\u00e9" * 40_000]),
        m.BlobChunk(digest=SHA, offset=0, data=bytes(range(256)) * 250),
    ]
    # Leases are free-form; large frames cost the most time.
    weighted = SAMPLES * 4 + [lease] * 12 + extra[:3] * 8 + extra
    seeds = []
    for message in weighted:
        frame = encode(message)
        seeds.append(Seed(message, frame, tuple(headers_of(frame[PREFIX_BYTES:]))))
    return seeds


def _position(rng: random.Random, data: bytes) -> int:
    """Anywhere, but half of the time near the start, where the structure is."""
    if not data:
        return 0
    return rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 64))


def flip_bits(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        data[_position(rng, data)] ^= 1 << rng.randrange(8)


def set_bytes(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[_position(rng, data)] = rng.randrange(256)


def insert(rng: random.Random, data: bytearray) -> None:
    at = _position(rng, data)
    data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 16)))


def delete(rng: random.Random, data: bytearray) -> None:
    at = _position(rng, data)
    del data[at : at + rng.choice((1, 1, 2, 4, 16))]


def duplicate(rng: random.Random, data: bytearray) -> None:
    at = _position(rng, data)
    piece = data[at : at + rng.choice((1, 4, 16, 64))]
    data[at:at] = piece * rng.choice((1, 1, 2, 100))


def swap(rng: random.Random, data: bytearray) -> None:
    length = rng.choice((1, 1, 4, 8))
    a, b = _position(rng, data), _position(rng, data)
    first, second = data[a : a + length], data[b : b + length]
    if len(first) == len(second):
        data[a : a + length], data[b : b + length] = second, first


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def extend(rng: random.Random, data: bytearray) -> None:
    data += rng.choice((b"\0", b"\xc0", rng.randbytes(rng.randrange(1, 200)), bytes(data)))


BYTE_MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    *(flip_bits, set_bytes, insert, delete, duplicate, swap, truncate, extend),
)


def splice(rng: random.Random, one: bytes, other: bytes) -> bytes:
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def lie(rng: random.Random, seed: Seed) -> bytes:
    """One to three length fields of the body claim what is not there."""
    body = bytearray(seed.body)
    for start, end, kind in sorted(
        rng.sample(seed.headers, min(len(seed.headers), rng.choice((1, 1, 1, 3)))), reverse=True
    ):
        told = rng.choice(tuple(_HEADERS)) if rng.random() < 0.3 else kind
        body[start:end] = header(told, rng.choice(CLAIMS), rng.choice((0, 1, 2, 4)))
    return bytes(body)


def nest(rng: random.Random, depth: int) -> bytes:
    shells = rng.choice(
        ((b"\x91",), (b"\x81\xa1k",), (b"\x91", b"\x81\xa1k"), (b"\xdc\0\1",), (b"\xdf\0\0\0\1\xa0",), (b"\x81\x91",))
    )
    return b"".join(shells[i % len(shells)] for i in range(depth)) + b"\xc0"


def restructure(rng: random.Random, seed: Seed) -> bytes:
    """A body with a wrong type, a key too many, too few or twice, or a very deep value, at any place of the map."""
    body = body_of(seed.message)
    place, inner = body, [body]
    while inner and rng.random() < 0.6:
        place = rng.choice(inner)
        inner = [value for value in place.values() if isinstance(value, dict) and value]
    key = rng.choice(list(place))
    match rng.randrange(7):
        case 0 | 1:
            place[key] = rng.choice(STRANGE_VALUES)
        case 2:
            del place[key]
        case 3:
            place[rng.choice(("type", "lease_id", "policy", "?", "", "x" * 500))] = rng.choice(STRANGE_VALUES)
        case 4:
            place[key] = msgspec.Raw(nest(rng, rng.choice((1, 60, 70, 300, rng.randrange(880, 1010), 5000))))
        case 5:
            items = list(place.items())
            rng.shuffle(items)
            place.clear()
            place.update(items)
        case 6:
            packed = msgspec.msgpack.encode(body)
            twice = msgspec.msgpack.encode(key) + msgspec.msgpack.encode(rng.choice((body.get(key), *STRANGE_VALUES)))
            return bytes([packed[0] + 1]) + packed[1:] + twice if packed[0] < 0x8F else packed + twice
    return msgspec.msgpack.encode(body)


class Mutator:
    """See the module's guarantee."""

    def __init__(self, seed: int) -> None:
        self.seeds = corpus()
        self.valid = {seed.frame for seed in self.seeds}
        self._seed = seed

    def mutant(self, number: int) -> Mutant:
        rng = random.Random(self._seed << 40 | number)
        source = rng.choice(self.seeds)
        resealed = rng.random() < 0.6
        kind = rng.randrange(12)
        if kind < len(BYTE_MUTATIONS):
            data = bytearray(source.body if resealed else source.frame)
            mutate = BYTE_MUTATIONS[kind]
            for step in (mutate, *rng.choices(BYTE_MUTATIONS, k=rng.choice((0, 0, 0, 1, 2)))):
                if data:
                    step(rng, data)
            name, spoiled = mutate.__name__, bytes(data)
        elif kind == 8:
            other = rng.choice(self.seeds)
            name, spoiled = "splice", splice(rng, *((s.body if resealed else s.frame) for s in (source, other)))
        else:
            name, make = ("lie", lie) if kind == 9 else ("restructure", restructure)
            spoiled = make(rng, source)
            if not resealed:
                spoiled = source.frame[:PREFIX_BYTES] + spoiled
        spoiled = spoiled[:MAX_FRAME_BYTES]
        if resealed:
            version = SCHEMA_VERSION if rng.random() < 0.98 else rng.randrange(65_536)
            spoiled = sealed(spoiled[: MAX_FRAME_BYTES - PREFIX_BYTES], version)
        return Mutant(spoiled, name, resealed)
