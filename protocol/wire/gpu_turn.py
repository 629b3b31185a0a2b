"""Whose turn it is on a GPU that both sides share, as a part of messages.

Guarantee: as in `protocol.wire.messages`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.wire.policy_messages import Count


class GpuTurn(Struct, frozen=True, forbid_unknown_fields=True):
    """On the GPU that the trainer shares with producers (`pipeline.gpu: turns`). Every hand-over raises `number` by one. In the
    trainer's turn producers put their engine to sleep; what still runs after `within_s` is cut."""

    number: Count
    side: Literal["trainer", "producers"]
    within_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
