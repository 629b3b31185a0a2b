"""A frame made to hurt is refused with CodecError, at once and without memory; the long form is `campaigns.fuzz.frames`."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from campaigns.fuzz import frames
from campaigns.fuzz.frames import SLOWEST_S, Defect, campaign, memory_bound, peak_of_decode, seconds_to_decode
from campaigns.fuzz.mutations import BYTE_MUTATIONS, header, sealed
from protocol.wire import messages as m
from protocol.wire.codec import CodecError, decode, encode
from tests.unit.protocol.samples import SAMPLES, body_of

LEASE = next(message for message in SAMPLES if isinstance(message, m.Lease))
KINDS = ("str", "bin", "array", "map", "ext")


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def lease_with(field: str, raw: bytes) -> bytes:
    return sealed(packed(body_of(LEASE) | {field: msgspec.Raw(raw)}))


def map_of(entries: list[tuple[bytes, bytes]]) -> bytes:
    return header("map", len(entries), 0) + b"".join(itertools.chain.from_iterable(entries))


@pytest.mark.long
def test_twenty_thousand_spoiled_frames() -> None:
    report = campaign(seed=1, numbers=range(20_000))
    assert report.frames == 20_000
    assert report.refused.total() + report.accepted_unchanged + report.accepted_changed == 20_000
    assert "other" not in report.refused, "a reason that nobody classified"
    assert set(report.refused) | {"timestamp"} == {name for name, _ in frames.REASONS} | {"other_schema", "timestamp"}
    assert set(report.mutations) == {mutate.__name__ for mutate in BYTE_MUTATIONS} | {"splice", "lie", "restructure"}
    assert report.accepted_changed > 100
    assert report.accepted_unchanged > 50
    assert report.memory_samples > 100
    assert report.longest_frame_bytes == 65_536


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda frame: dict[str, int]()["key"], "KeyError: 'key'"),
        (lambda frame: m.Bye("finished"), "a damaged frame was accepted"),
        (lambda frame: decode(bytes(2) + bytes(bytearray(300_000 + 200 * len(frame)))), r"decode held \d+ bytes"),
    ],
    ids=["another exception", "accepts everything", "memory"],
)
def test_the_fuzzer_sees_a_broken_codec(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[bytes], Any], complaint: str
) -> None:
    monkeypatch.setattr(frames, "decode", broken)
    with pytest.raises(Defect, match=complaint) as caught:
        campaign(seed=1, numbers=range(1000))
    assert str(caught.value).startswith("frame ")


def test_a_length_field_that_lies_as_a_map_key_or_inside_a_nest_allocates_nothing() -> None:
    for kind, claim in itertools.product(KINDS, (2**16, 2**28, 2**32 - 1)):
        for before in (b"\x81", b"\x81\x91", b"\xdd\xff\xff\xff\xff" * 200, b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"):
            for field in ("prompt", "columns"):
                frame = lease_with(field, before + header(kind, claim, 4))
                with pytest.raises(CodecError):
                    decode(frame)
                assert min(peak_of_decode(frame) for _ in range(2)) < 65_536 + 200 * 200


LARGE = map_of([(packed(f"{i:02}"), b"\xc0") for i in range(16)])
"""A harmless map that makes the codec unpack what is around it level by level, which costs the most."""


@pytest.mark.long
@pytest.mark.parametrize("around", [b"", LARGE], ids=["in one go", "level by level"])
@pytest.mark.parametrize(
    "item",
    [*(b"\x80", b"\x91\xc0", b"\x81\xa0\x80", b"\x91\xcc\xdf"), b"\x91" * 55 + b"\xcc\xdf", b"\xd4\5\1"],
    ids=lambda item: item.hex()[-12:],
)
def test_16_kib_of_tiny_values_stay_within_the_bounds(item: bytes, around: bytes) -> None:
    count = (16_384 - 440 - len(around)) // len(item)
    frame = lease_with("prompt", header("array", count + bool(around), 4) + item * count + around)
    assert 16_000 < len(frame) <= 16_384
    seconds, outcome = seconds_to_decode(frame)
    assert isinstance(outcome, m.Lease)
    assert len(outcome.prompt) == count + bool(around)
    assert seconds < 3 * SLOWEST_S, "2 to 6 ms on an idle core, and several times that beside a large heap"
    assert min(peak_of_decode(frame) for _ in range(2)) < memory_bound(frame)


COLLIDING = [bytes([0x9F, *key]) for key in itertools.islice(itertools.product((0xFF, 0xFE), repeat=15), 14_000)]
"""Tuples of -1 and -2, which have one hash: in a dict each is compared with all before it."""


@pytest.mark.parametrize(
    ("field", "path"),
    [("prompt", b""), ("prompt", b"\x91\x81\xa1k"), ("columns", b"\x81\xa1c"), ("columns", b"\x81\xa1c\x91\x81\1")],
    ids=["prompt", "in a prompt", "column", "in a column"],
)
@pytest.mark.parametrize("width", [2, 4])
def test_a_map_made_to_collide_is_refused_at_once(field: str, path: bytes, width: int) -> None:
    """Before it was refused, this frame took 2 s, and one of transport.max_message_bytes would have taken two days."""
    bomb = header("map", len(COLLIDING), width) + b"\xc0".join(COLLIDING) + b"\xc0"
    frame = lease_with(field, path + bomb)
    seconds, outcome = seconds_to_decode(frame)
    assert isinstance(outcome, CodecError)
    assert str(outcome).startswith("body refused: a map of more than 15 entries needs text for keys: Expected `str`")
    assert seconds < SLOWEST_S


def test_a_map_of_numbers_may_have_15_entries_and_not_16() -> None:
    for count in range(20):
        columns = {"lookup": [{number: str(number) for number in range(count)}], "padding": "\u07df" * 40}
        lease = msgspec.structs.replace(LEASE, columns=columns)
        if count < 16:
            assert decode(encode(lease)) == lease
        else:
            with pytest.raises(
                CodecError, match=r"^cannot encode Lease: a map of more than 15 entries needs text for keys"
            ):
                encode(lease)
            with pytest.raises(CodecError, match="needs text for keys"):
                decode(sealed(packed(body_of(lease))))
    smallest = map_of([(bytes([number]), b"\xc0") for number in range(16)])
    with pytest.raises(CodecError, match="needs text for keys"):
        decode(lease_with("prompt", smallest))


@pytest.mark.parametrize("count", [15, 16, 300])
def test_a_map_with_text_for_keys_may_have_any_length(count: int) -> None:
    large = {f"key {number}": [number, {"deep": {number: None}}] for number in range(count)}
    lease = msgspec.structs.replace(LEASE, prompt=[large], columns={"c": large, "n": [[large], "\u07df"]})
    assert decode(encode(lease)) == lease


@pytest.mark.long
def test_a_map_with_a_32_bit_length_is_read() -> None:
    large = {str(number): None for number in range(65_536)}
    lease = msgspec.structs.replace(LEASE, columns={"c": large})
    frame = encode(lease)
    assert b"\xdf\0\1\0\0" in frame
    assert decode(frame) == lease


def test_what_looks_like_the_header_of_a_large_map_inside_a_value_is_none() -> None:
    columns = {
        "text": "\u07df\u07de" * 40,
        "bytes": b"\xde\xdf" * 40,
        "numbers": [222, 223, -(2**63), 0.1, float.fromhex("0x1.fdfdededfdep0")] * 10,
        "nested": [{"a": {"\u07df": ["\u07de" * 40, {"b": 223, "c": {1: 222}}]}, "long enough": "x" * 40}],
        "scalar": 223,
    }
    lease = msgspec.structs.replace(LEASE, prompt="\u07df" * 100, columns=columns)
    assert decode(encode(lease)) == lease


def test_large_maps_nest_64_levels_and_not_65() -> None:
    for levels, allowed in [(64, True), (65, False), (400, False)]:
        value: Any = {str(number): number for number in range(16)}
        for _ in range(levels):
            value = [value]
        lease = msgspec.structs.replace(LEASE, columns={"c": value})
        if allowed:
            assert decode(encode(lease)) == lease
        else:
            with pytest.raises(CodecError, match="nested more than 64 levels deep"):
                encode(lease)


def test_unpacking_level_by_level_keeps_no_copy_per_level() -> None:
    value: Any = "\u07df" * 500_000
    for level in range(60):
        value = {"k": value} if level % 2 else [value]
    frame = encode(msgspec.structs.replace(LEASE, columns={"c": value}))
    tracemalloc.start()
    message = decode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(message, m.Lease)
    assert message.columns == {"c": value}
    assert peak < 4 * len(frame)
