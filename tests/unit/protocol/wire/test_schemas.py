"""The release before is understood and understands: schema 1, pinned to the bytes that it made."""

from pathlib import Path

import msgpack
import msgspec
import pytest

from protocol.transport.channel import _MAX_PEERS, PeerSchemas, TrainerSchema
from protocol.wire import messages as m
from protocol.wire.codec import CodecError, SchemaMismatchError, decode, encode, schema_of
from protocol.wire.schemas import (
    JOURNAL_SCHEMAS,
    SCHEMA_VERSION,
    SINCE,
    SINCE_MESSAGES,
    group_schema,
    newer_than_oldest,
)
from replay.groups import GroupShape
from tests import release_before
from tests.unit.protocol.samples import SAMPLES, as_of, body_of, parts_of
from tests.unit.protocol.wire.test_codec import sealed

_PAGES = (Path(__file__).parents[1] / "schema_1.txt").read_text().split("\n\n")[1:]
FRAMES = {page.split()[0]: bytes.fromhex("".join(page.split()[1:])) for page in _PAGES}

every_sample = pytest.mark.parametrize(
    "message",
    [message for message in SAMPLES if type(message) not in SINCE_MESSAGES],
    ids=lambda message: type(message).__name__,
)


@every_sample
def test_the_bytes_of_schema_1(message: m.Message) -> None:
    frame = FRAMES[type(message).__name__]
    assert encode(message, schema_version=1) == frame
    assert decode(frame) == as_of(1, message)
    assert schema_of(frame) == 1
    assert release_before.decode(frame) == body_of(message, 1)
    assert release_before.encode(**body_of(message, 1)) == frame


def test_what_schema_1_lacks_is_left_out_and_comes_back_as_its_default() -> None:
    hello, beat = (next(message for message in SAMPLES if type(message) is kind) for kind in (m.Hello, m.Heartbeat))
    assert (hello.release, beat.idle_s) == ("0.2.0", 0.5)
    assert (decode(FRAMES["Hello"]).release, decode(FRAMES["Heartbeat"]).idle_s) == ("", 0.0)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in SINCE.items() for field in fields])
def test_a_frame_has_the_fields_of_its_own_schema_and_no_other(kind: type, field: str) -> None:
    """The fields of a message, and those of what is in one."""
    since = SINCE[kind][field]
    message = next(message for message in SAMPLES if kind in (type(message), *map(type, parts_of(message).values())))
    assert type(decode(encode(message, schema_version=since))) is type(message)
    one_more = body_of(message, since - 1)
    part = next((name for name, value in parts_of(message).items() if type(value) is kind), None)
    holder, value = (one_more, message) if part is None else (one_more[part], getattr(message, part))
    holder[field] = msgspec.to_builtins(getattr(value, field), builtin_types=(bytes,))
    with pytest.raises(CodecError, match=f"unknown field `{field}`"):
        decode(sealed(msgpack.packb(one_more), since - 1))


def test_what_the_oldest_schema_cannot_say_of_sampling() -> None:
    assert newer_than_oldest(m.Sampling(2, 8, 1.0, top_p=0.5)) == []
    assert newer_than_oldest(m.Sampling(2, 8, 1.0, stop=("</a>",), ignore_eos=True)) == ["stop", "ignore_eos"]


@pytest.mark.parametrize("kind", SINCE_MESSAGES)
def test_a_message_is_not_in_the_schemas_before_its_own(kind: type) -> None:
    message = next(message for message in SAMPLES if type(message) is kind)
    assert decode(encode(message)) == message
    with pytest.raises(CodecError, match="schema 1 does not have it"):
        encode(message, schema_version=1)
    with pytest.raises(CodecError, match="body refused"):
        decode(sealed(msgpack.packb(body_of(message)), 1))


def test_newer_fields_have_defaults_and_stand_last() -> None:
    for kind, since in SINCE.items():
        assert set(since.values()) <= set(range(2, SCHEMA_VERSION + 1))
        newer = msgspec.structs.fields(kind)[-len(since) :]
        assert {field.name for field in newer} == set(since)
        assert not any(field.required for field in newer)


def test_a_journal_s_groups_are_read_whatever_release_wrote_them() -> None:
    """Of schema 1 on, for ever; and they are written so that the release before reads them."""
    shape = GroupShape(num_generations=2, num_rewards=1, max_completion_length=8, vocab_size=16)
    group = next(message for message in SAMPLES if isinstance(message, m.Group))
    assert shape.load(FRAMES["Group"]).group_id == group.lease_id
    assert 1 in JOURNAL_SCHEMAS
    assert shape.load(encode(group, schema_version=1)).newest_version == 3
    assert encode(group, schema_version=group_schema()) == FRAMES["Group"]
    assert shape.load(encode(group, schema_version=group_schema("token_versions"))).newest_version == 4
    with pytest.raises(SchemaMismatchError):
        shape.load(encode(group, schema_version=SCHEMA_VERSION + 1))


def test_a_peer_is_answered_in_the_schema_of_its_last_frame_and_a_stranger_in_the_oldest() -> None:
    schemas = PeerSchemas()
    assert schemas[b"p"] == 1
    for spoken, answered in [(2, 2), (1, 1), (2, 2), (3, 2), (0, 1), (65_535, 2)]:
        schemas.note(b"p", spoken)
        assert schemas[b"p"] == answered
    schemas.forget(b"p")
    assert schemas[b"p"] == 1


def test_the_peers_heard_longest_ago_are_forgotten() -> None:
    schemas = PeerSchemas()
    schemas.note(b"first", 2)
    schemas.note(b"second", 2)
    for number in range(_MAX_PEERS - 2):
        schemas.note(str(number).encode(), 2)
    schemas.note(b"first", 2)
    schemas.note(b"one too many", 2)
    assert (schemas[b"first"], schemas[b"second"], schemas[b"one too many"]) == (2, 1, 2)


def test_a_connection_goes_down_to_the_trainer_s_schema_and_never_up() -> None:
    schema = TrainerSchema()
    assert schema.version == 2
    for heard, spoken in [(3, 2), (2, 2), (1, 1), (2, 1), (0, 1)]:
        schema.note(heard)
        assert schema.version == spoken
