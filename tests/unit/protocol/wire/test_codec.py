"""What `protocol.wire.codec` guarantees: a frame decodes to exactly the message that was encoded, or CodecError."""

import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from campaigns.fuzz.mutations import sealed
from protocol.wire import codec
from protocol.wire import messages as m
from protocol.wire.codec import PREFIX_BYTES, CodecError, SchemaMismatchError, decode, encode
from tests.unit.protocol.samples import SAMPLES, SHA, body_of

every_sample = pytest.mark.parametrize("message", SAMPLES, ids=lambda value: type(value).__name__)


def changed(message: m.Message, **fields: Any) -> bytes:
    return sealed(msgpack.packb(body_of(message) | fields))


def sample(kind: type) -> Any:
    return next(message for message in SAMPLES if type(message) is kind)


def test_there_is_a_sample_of_every_message_type() -> None:
    assert {type(message) for message in SAMPLES} == set(m.Message.__args__)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


@pytest.mark.long
@given(ANYTHING, st.dictionaries(st.text(), ANYTHING, max_size=3))
def test_whatever_a_lease_holds_arrives(prompt: object, columns: dict[str, object]) -> None:
    lease = msgspec.structs.replace(sample(m.Lease), prompt=prompt, columns=columns)
    assert decode(encode(lease)) == lease


def test_threads_that_decode_for_the_first_time_build_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once crash: see `_one_builds`."""
    building = []
    most = []
    build = msgspec.msgpack.Decoder

    def slow(kinds: object) -> object:
        building.append(kinds)
        most.append(len(building))
        time.sleep(0.05)
        building.pop()
        return build(kinds)

    codec._built.cache_clear()
    monkeypatch.setattr(msgspec.msgpack, "Decoder", slow)
    frame = encode(SAMPLES[0])
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(decode, [frame] * 4, [m.Message, type(SAMPLES[0])] * 2))
    assert decoded == [SAMPLES[0]] * 4
    assert most == [1, 1]


def test_the_frame_byte_by_byte() -> None:
    """If this fails, the wire changed: raise SCHEMA_VERSION."""
    frame = encode(m.Bye(reason="finished"))
    body = b"\x82" + b"\xa4type" + b"\xa3bye" + b"\xa6reason" + b"\xa8finished"
    assert frame[:4] == b"SL\x02\x00"
    assert frame[4:8] == struct.pack("<I", zlib.crc32(b"SL\x02\x00" + body)) == bytes.fromhex("261ee38e")
    assert frame[8:] == body
    assert PREFIX_BYTES == 8


@every_sample
def test_plain_msgpack_reads_any_body_and_its_own_body_is_read(message: m.Message) -> None:
    body = msgpack.unpackb(encode(message)[8:])
    assert body == body_of(message)
    assert decode(sealed(msgpack.packb(body))) == message


@every_sample
def test_every_single_bit_flip_is_refused(message: m.Message) -> None:
    frame = bytearray(encode(message))
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            decode(bytes(frame))
        frame[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(frame)) == message


@every_sample
def test_every_truncation_and_every_extension_is_refused(message: m.Message) -> None:
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            decode(frame[:length])
    with pytest.raises(CodecError, match="checksum"):
        decode(frame + b"\x00")
    with pytest.raises(CodecError, match="trailing"):
        decode(sealed(frame[8:] + b"\x00"))


def test_the_reason_of_a_refusal() -> None:
    frame = encode(m.Bye(reason="finished"))
    for bad, reason in [
        (b"", "frame of 0 bytes is shorter than the 8-byte prefix"),
        (frame[:7], "frame of 7 bytes is shorter than the 8-byte prefix"),
        (b"GET / HTTP/1.1\r\n", "frame starts with b'GE', not b'SL'"),
        (frame[:-1] + b"\xff", "checksum mismatch"),
    ]:
        with pytest.raises(CodecError) as caught:
            decode(bad)
        assert str(caught.value) == reason


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xa3bye")
@example(b"\x81\x80\x01")  # a map as a map key
@example(b"\x81\xd4\x05\x00\x01")  # an extension as a map key
@example(b"\xc7\x0c\xff" + b"\xff" * 12)  # a timestamp with two billion nanoseconds
@example(b"\xdf\xff\xff\xff\xff")  # a map of 2**32 - 1 entries in five bytes
def test_only_codec_errors_escape_random_bodies_with_a_correct_checksum(body: bytes) -> None:
    with pytest.raises(CodecError):
        decode(sealed(body))


@pytest.mark.parametrize("version", [0, 1, 7, 65_535])
def test_another_schema_version_is_named(version: int) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        decode(sealed(msgpack.packb(body_of(m.Bye(reason="finished"))), version))
    assert caught.value.peer_version == version
    assert str(caught.value) == f"peer speaks protocol schema {version}, this process speaks {codec.SCHEMA_VERSION}"


def test_another_schema_version_wins_over_a_body_that_is_unknown_here() -> None:
    with pytest.raises(SchemaMismatchError):
        decode(sealed(b"whatever release 3 sends", version=3))


def test_a_damaged_frame_is_not_taken_for_another_release() -> None:
    frame = bytearray(encode(m.Bye(reason="finished")))
    frame[2] ^= 4
    with pytest.raises(CodecError) as caught:
        decode(bytes(frame))
    assert not isinstance(caught.value, SchemaMismatchError)


def parts_of(message: Any) -> Iterator[Any]:
    """The message and every struct in it."""
    yield message
    for value in msgspec.structs.asdict(message).values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, msgspec.Struct):
                yield from parts_of(each)


@every_sample
def test_no_message_changes_and_none_has_a_field_that_is_unknown_here(message: m.Message) -> None:
    with pytest.raises(CodecError, match="unknown field `another`"):
        decode(changed(message, another=1))
    for part in parts_of(message):
        for name in part.__struct_fields__:
            with pytest.raises(AttributeError):
                setattr(part, name, None)
        with pytest.raises(msgspec.ValidationError, match="unknown field `another`"):
            msgspec.convert(msgspec.to_builtins(part) | {"another": 1}, type(part))


def test_a_peer_that_leaves_out_what_may_be_left_out_means_the_plain_case() -> None:
    lease = decode(changed(sample(m.Lease), sampling=POSSIBLE))
    assert lease.sampling == m.Sampling(
        2, 8, 1.0, top_p=1.0, top_k=0, min_p=0.0, stop=(), stop_token_ids=(), ignore_eos=False, regex="", json_schema=""
    )
    beat = body_of(m.Heartbeat(3, 4, ["a"], 5, 6.0))
    required = {
        name: beat[name] for name in ("type", "policy_version", "capacity", "held", "tokens_generated", "busy_s")
    }
    assert decode(sealed(msgpack.packb(required))) == m.Heartbeat(
        3, 4, ["a"], 5, 6.0, waiting=0, generating=0, scoring=0, unacked=0, idle_s=0.0, refused_version=-1, refusal="",
        relay="", asleep_in=-1,
    )  # fmt: skip


POSSIBLE = {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0}


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (m.Bye, {"reason": "bored"}, "Invalid enum value 'bored' - at `$.reason`"),
        (m.Bye, {"reason": 3}, "Expected `str`, got `int` - at `$.reason`"),
        (m.Bye, {"mood": "good"}, "Object contains unknown field `mood`"),
        (m.Bye, {"type": "goodbye"}, "Invalid value 'goodbye' - at `$.type`"),
        (m.Bye, {"type": None}, "Expected `str`, got `null` - at `$.type`"),
        (m.Heartbeat, {"policy_version": -2}, "Expected `int` >= -1 - at `$.policy_version`"),
        (m.Heartbeat, {"policy_version": True}, "Expected `int`, got `bool` - at `$.policy_version`"),
        (m.PolicyOffer, {"probe": {"row_length": 1}}, "Expected `int` >= 2 - at `$.probe.row_length`"),
        (m.Heartbeat, {"tokens_generated": 2**53 + 1}, "Expected `int` <= 9007199254740992 - at `$.tokens_generated`"),
        (m.Heartbeat, {"capacity": -1}, "Expected `int` >= 0 - at `$.capacity`"),
        (m.Heartbeat, {"busy_s": float("nan")}, "Expected `float` >= 0.0 - at `$.busy_s`"),
        (m.Heartbeat, {"busy_s": float("inf")}, "Expected `float` <= 1000000000.0 - at `$.busy_s`"),
        (m.Heartbeat, {"held": ["a", ""]}, "Expected `str` of length >= 1 - at `$.held[1]`"),
        (m.Heartbeat, {"held": ["x" * 129]}, "Expected `str` of length <= 128 - at `$.held[0]`"),
        (m.Heartbeat, {"held": ["a"] * 65_537}, "Expected `array` of length <= 65536 - at `$.held`"),
        (m.Nack, {"detail": "x" * 65_537}, "Expected `str` of length <= 65536 - at `$.detail`"),
        (m.Lease, {"columns": [1]}, "Expected `object`, got `array` - at `$.columns`"),
        (m.Lease, {"columns": {1: 2}}, "Expected `str`, got `int` - at `key` in `$.columns`"),
        (m.Group, {"logprobs": [0.5, 0.25]}, "Expected `bytes`, got `array` - at `$.logprobs`"),
        (m.Group, {"lease_id": b"7.0"}, "Expected `str`, got `bytes` - at `$.lease_id`"),
        (m.BlobRequest, {"length": 0}, "Expected `int` >= 1 - at `$.length`"),
        (m.BlobRequest, {"length": 2**26 + 1}, "Expected `int` <= 67108864 - at `$.length`"),
        (m.BlobMissing, {"digest": "ABCD" * 16}, "at `$.digest`"),
        (m.Lease, {"sampling": POSSIBLE | {"num_generations": 0}}, ">= 1 - at `$.sampling.num_generations`"),
        (m.Lease, {"sampling": POSSIBLE | {"num_generations": 4097}}, "<= 4096 - at `$.sampling.num_generations`"),
        (m.Lease, {"sampling": POSSIBLE | {"max_completion_length": 0}}, "at `$.sampling.max_completion_length`"),
        (m.Lease, {"sampling": POSSIBLE | {"temperature": -0.1}}, "at `$.sampling.temperature`"),
        (m.Lease, {"sampling": POSSIBLE | {"top_p": 0.0}}, "> 0.0 - at `$.sampling.top_p`"),
        (m.Lease, {"sampling": POSSIBLE | {"top_p": 1.5}}, "at `$.sampling.top_p`"),
        (m.Lease, {"sampling": POSSIBLE | {"min_p": -0.1}}, "at `$.sampling.min_p`"),
        (m.Lease, {"sampling": POSSIBLE | {"seed": 1}}, "unknown field `seed` - at `$.sampling`"),
        (m.BlobMissing, {"digest": SHA + "\n"}, "at `$.digest`"),
    ],
)
def test_a_body_that_breaks_the_schema_is_refused_with_the_field(
    kind: type, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(CodecError) as caught:
        decode(changed(sample(kind), **fields))
    assert str(caught.value).startswith("body refused: ")
    assert str(caught.value).endswith(reason)


@every_sample
def test_a_missing_field_is_refused(message: m.Message) -> None:
    required = [field.encode_name for field in msgspec.structs.fields(type(message)) if field.required]
    for name in ["type", *required]:
        body = body_of(message)
        del body[name]
        with pytest.raises(CodecError, match=name):
            decode(sealed(msgpack.packb(body)))


NESTING = 100_000


@pytest.mark.parametrize("field", ["prompt", "columns"])
@pytest.mark.parametrize("shell", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_a_nesting_bomb_is_refused(field: str, shell: bytes) -> None:
    bomb = shell * NESTING + b"\xc0"
    if field == "columns":
        bomb = b"\x81\xa1x" + bomb
    body = body_of(sample(m.Lease))
    del body[field]
    packed = msgpack.packb(body)
    assert packed[0] == 0x80 + len(body)
    frame = sealed(bytes([packed[0] + 1]) + packed[1:] + msgpack.packb(field) + bomb)
    with pytest.raises(CodecError, match="recursion"):
        decode(frame)


def test_a_nested_column_is_refused_by_the_sender() -> None:
    bomb: list[object] = []
    for _ in range(NESTING):
        bomb = [bomb]
    lease = msgspec.structs.replace(sample(m.Lease), columns={"bomb": bomb})
    with pytest.raises(CodecError, match="cannot encode Lease"):
        encode(lease)
    while bomb:  # one by one: freeing the list in one go is itself a deep recursion
        bomb = bomb.pop()


@pytest.mark.parametrize(
    "value",
    [object(), 2**64, -(2**63) - 1, "\ud800", len, 1j],
    ids=["object", "large", "small", "surrogate", "len", "1j"],
)
def test_a_column_that_msgpack_cannot_carry_is_refused_by_the_sender(value: object) -> None:
    for fields in ({"columns": {"odd": value}}, {"prompt": [value]}):
        with pytest.raises(CodecError, match=r"^cannot encode Lease: "):
            encode(msgspec.structs.replace(sample(m.Lease), **fields))


def test_a_memoryview_decodes_to_bytes_of_its_own() -> None:
    frame = bytearray(encode(sample(m.BlobChunk)))
    decoded = decode(memoryview(frame))
    frame[:] = bytes(len(frame))
    assert decoded == sample(m.BlobChunk)
    assert type(decoded.data) is bytes
