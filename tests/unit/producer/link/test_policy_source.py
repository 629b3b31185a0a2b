"""The source of policies of a producer that shares none: the trainer's file, else its socket."""

import hashlib
import threading
from pathlib import Path

import pytest

from producer.link.policy_source import TrainerSource
from protocol.config.operation import TransportSection
from protocol.runtime.scratch import shared_memory
from protocol.wire.messages import PolicyInfo, PolicyOffer

BLOB = b"weights"
DIGEST = hashlib.sha256(BLOB).hexdigest()
POLICY = PolicyInfo(3, DIGEST, len(BLOB))


def found(file: str) -> tuple[bytes | memoryview | None, dict[str, int]]:
    source = TrainerSource(TransportSection())
    blob, _ = source.find(POLICY, PolicyOffer(DIGEST, shared_file=file), threading.Event())
    return blob, {name: count for name, count in source.counts.downloads.items() if count}


@pytest.mark.parametrize(
    ("content", "expected"), [(BLOB, (BLOB, {"file": 1})), (b"weighty", (None, {})), (b"w", (None, {}))]
)
def test_the_trainers_file_is_taken_if_it_is_the_policy(
    content: bytes, expected: tuple[bytes | None, dict[str, int]]
) -> None:
    with shared_memory() as memory:
        if memory.folder is None:
            pytest.skip("this host has no shared memory")
        file = memory.folder / "policy"
        file.write_bytes(content)
        assert found(str(file)) == expected


def test_a_file_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "policy").write_bytes(BLOB)
    assert found(str(tmp_path / "policy")) == (None, {})
    assert found("") == (None, {})


@pytest.mark.parametrize(("blob", "is_right"), [(BLOB, True), (b"weighty", False)])
def test_what_comes_from_the_trainer_is_verified(blob: bytes, is_right: bool) -> None:
    source = TrainerSource(TransportSection())
    claim = source.unshared(POLICY)
    into = claim.room(len(blob))
    into[:] = blob
    assert source.take_from_trainer(POLICY, into, claim, 1.0) is is_right
    assert source.counts.downloads["trainer"] == is_right
    claim.release()
