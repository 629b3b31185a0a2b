"""What rank 0 tells the other ranks to do next, typed.

Guarantee: `decode` returns exactly the plan that was encoded, or raises `PlanError`; a plan holds data only. Groups travel as the
messages that they arrived in.
"""

import msgspec

from protocol.wire.codec import encode as encode_message
from replay.batches.cutting import CutBatch
from replay.groups import GroupShape, message_of

PIECE_BYTES = 2**26


class PlanError(Exception):
    """What rank 0 said is no plan."""


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin"):
    """What run this is, and where it starts."""

    num_prompts: int
    vocab_size: int
    step: int  # optimizer steps taken before
    files: dict[str, int]  # of the checkpoint, with their sizes in bytes; empty without one


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="piece"):
    """What comes next of the files that `Begin` names, one after another: at most `PIECE_BYTES`, of one file."""

    data: bytes


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="train"):
    """Take the steps over this batch. Fields as of `replay.batches.cutting.CutBatch`."""

    step: int
    num_iterations: int
    last_step: int
    num_fresh: int
    groups: list[bytes]

    @classmethod
    def of(cls, batch: CutBatch) -> "Train":
        frames = [encode_message(message_of(group)) for group in batch.groups]
        return cls(batch.step, batch.num_iterations, batch.last_step, batch.num_fresh, frames)

    def batch(self, shape: GroupShape) -> CutBatch:
        groups = [shape.load(frame) for frame in self.groups]
        return CutBatch(self.step, self.num_iterations, self.last_step, groups, self.num_fresh)


Plan = Begin | Piece | Train
_DECODER: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    return msgspec.msgpack.encode(plan)


def decode(data: bytes) -> Plan:
    """
    Raises:
        PlanError: it is none.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise PlanError(f"rank 0 runs another release, or what it said was damaged: {error}") from error
