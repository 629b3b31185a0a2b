"""What the daemons were seen to do, written down beside them and apart from their own journal.

Guarantee: a line that `note` returned from survives the death of its process, at whatever instant; a line that a death cut
short is left out when the file is read. Equal groups have equal digests, on the wire and in the trainer.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.wire.messages import Group
from replay.groups import RolloutGroup


class EvidenceLog:
    """Appends JSON lines. Any thread may."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, what: str, **fields: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "t": time.monotonic()} | fields) + "\n").encode())
        os.fsync(self._file)


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def digest_of_message(group: Group) -> str:
    return _digest(
        group.lease_id,
        group.policy_version,
        group.prompt_ids,
        group.completion_lengths,
        group.completion_ids,
        group.logprobs,
        group.rewards,
        group.truncated,
    )


def digest_of_group(group: RolloutGroup) -> str:
    arrays = (
        group.prompt_ids, group.completion_lengths, group.completion_ids, group.logprobs, group.rewards, group.truncated,
    )  # fmt: skip
    return _digest(group.lease_id, group.policy_version, *(array.tobytes() for array in arrays))


def digest_of_weights(tensors: Iterable[tuple[str, bytes]]) -> str:
    """Return a digest of their names and bytes, in any order."""
    digest = hashlib.sha256()
    for name, data in sorted(tensors):
        digest.update(name.encode() + data)
    return digest.hexdigest()


def _digest(lease_id: str, policy_version: int, *buffers: bytes) -> str:
    digest = hashlib.sha256(f"{lease_id} {policy_version}".encode())
    for buffer in buffers:
        digest.update(len(buffer).to_bytes(8, "little") + buffer)
    return digest.hexdigest()[:32]
