"""The content of a group's body, and the run's tokenizer to read it with.

Guarantee: a `Content` that exists was decoded from an intact frame, agrees with its row and does not contradict itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protocol.errors import JournalError, SlipstreamError
from protocol.library_errors import reason_of
from protocol.wire.codec import CodecError, decode
from protocol.wire.messages import Group, MissingReward
from protocol.wire.model_folder import tokenizer_digest
from replay.groups import GroupShape, InvalidGroupError, RolloutGroup
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupRow

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Content:
    message: Group
    group: RolloutGroup
    reward_names: list[str]  # (F,)

    def totals(self, facts: dict[str, str]) -> list[float | None]:
        """Return the weighted sum of each completion's rewards; weights of another number of functions are none."""
        from replay.advantages import weighted_sums  # with the configuration, which takes long to import

        weights = np.array(json.loads(facts.get("reward_weights", "[]")), np.float32)
        if len(weights) != len(self.reward_names):
            weights = np.ones(len(self.reward_names), np.float32)
        return [None if np.isnan(total) else total for total in weighted_sums(self.group.rewards, weights).tolist()]

    def why_missing(self, missing: Sequence[MissingReward], completion: int) -> dict[str, str]:
        """Return why rewards of this completion are missing, as far as that is known."""
        about = [one for one in missing if not one.completions or completion in one.completions]
        lacking = np.flatnonzero(np.isnan(self.group.rewards[completion])).tolist()
        return {name: _why(name, about) for name in (self.reward_names[column] for column in lacking)}


class ContentReader:
    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._names = reward_names(reader.facts())

    def read(self, row: GroupRow) -> Content | None:
        """The content of a group; None if the trainer has deleted it since its row was read. `JournalError` if the body is
        damaged, or not the group of this row."""
        frame = self._reader.body(row)
        if frame is None:
            return None
        try:
            content = content_of(frame, self._names)
            group = content.group
            if (group.lease_id, group.policy_version) != (row.lease_id, row.policy_version):
                raise InvalidGroupError(f"the body is of group {group.lease_id}, policy version {group.policy_version}")
            if (group.num_tokens, len(frame)) != (row.num_tokens, row.num_bytes):
                raise InvalidGroupError(
                    f"the body has {group.num_tokens} tokens and {len(frame)} bytes, the row says {row.num_tokens} and "
                    f"{row.num_bytes}"
                )
        except (CodecError, InvalidGroupError) as error:
            raise JournalError(
                f"{self._reader.path}: group {row.lease_id} cannot be read: {error}; restore a copy of run_dir, or use "
                "the release that wrote it"
            ) from error
        return content

    def missing(self, row: GroupRow) -> list[MissingReward]:
        """Return why rewards of the group are missing, as far as its producer told."""
        try:
            return msgspec.msgpack.decode(self._reader.missing_rewards(row) or b"\x90", type=list[MissingReward])
        except msgspec.DecodeError:
            return []


def _why(function: str, about: list[MissingReward]) -> str:
    """`about` are the failures of one completion."""
    for one in about:
        if one.function == function:
            return f"{one.reason}: {one.problem}"
    for one in about:
        if not one.function:
            return f"the episode failed: {one.problem}"
        if one.completions:
            return f"left out, because {one.function} failed ({one.reason}) for this completion"
    return ""


def content_of(frame: bytes, names: list[str]) -> Content:
    """Decode a frame that was kept; raise `CodecError` or `InvalidGroupError`. `names` are those of the rewards, if they fit."""
    message = decode(frame)
    if not isinstance(message, Group):
        raise InvalidGroupError(f"the body is a {type(message).__name__}")
    shape = _shape_of(message)
    if len(names) != shape.num_rewards:
        names = [f"reward_{number}" for number in range(shape.num_rewards)]
    return Content(message, shape.parse(message), names)


def reward_names(facts: dict[str, str]) -> list[str]:
    return list(json.loads(facts.get("reward_names", "[]")))


def _shape_of(message: Group) -> GroupShape:
    """Computed from the message, because groups may be of an older configuration than the facts."""
    num_completions = len(message.completion_lengths) // 4
    if num_completions == 0:
        raise InvalidGroupError("completion_lengths is empty")
    if message.episodes:
        num_completions = 1 + max(0, int.from_bytes(message.episodes[-4:], "little", signed=True))
    return GroupShape(num_completions, len(message.rewards) // 4 // num_completions, _LARGEST, _LARGEST)


def load_tokenizer(facts: dict[str, str]) -> Any:
    """The tokenizer of the run, or a `JournalError` with the reason. It is never downloaded, and code that comes with a model
    is never run: a journal is data, and reading one is no decision to run what it names."""
    folder = facts.get("model_path")
    if folder is None:
        raise JournalError("the journal does not name its model")
    try:
        expected, trusted = facts.get("tokenizer_digest"), facts.get("trust_remote_code") == "true"
        is_local = expected is not None and Path(folder).is_dir()
        if is_local and tokenizer_digest(Path(folder), trust_remote_code=trusted) != expected:
            raise JournalError(f"the tokenizer in {folder} is not the one of the run")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except SlipstreamError as error:
        raise JournalError(str(error)) from error
    except Exception as error:  # transformers raises errors of many libraries
        raise JournalError(f"the tokenizer of {folder} cannot be loaded: {reason_of(error)}") from error
