"""The versions of the wire, and what each of them added.

Guarantee: this release talks with the one before. A change of the wire adds fields with defaults at the end of a message,
names them in `SINCE` and raises `SCHEMA_VERSION` by one.
"""

from msgspec import Struct

from protocol.wire.messages import (
    BundleOffer,
    BundleRequest,
    EngineFacts,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Policy,
    PolicyOffer,
    PolicyRequest,
    RelayPeers,
    Sampling,
)
from protocol.wire.policy_messages import BlobProgress

SCHEMA_VERSION = 2
READABLE_SCHEMAS = (SCHEMA_VERSION - 1, SCHEMA_VERSION)
"""The schemas that a peer may use: this release's, and that of the release before."""

SINCE: dict[type[Struct], dict[str, int]] = {
    Hello: {
        "release": 2,
        "swap_mode": 2,
        "evaluates": 2,
        "run_id": 2,
        "host": 2,
        "region": 2,
        "bundle": 2,
        "metrics": 2,
        "gpus": 2,
        "takes_turns": 2,
    },
    EngineFacts: {"quantization": 2, "trainer_quantization": 2},
    Lease: {"evaluates": 2},
    Sampling: {"stop": 2, "stop_token_ids": 2, "ignore_eos": 2, "regex": 2, "json_schema": 2},
    Policy: {"evaluates": 2, "turn": 2},
    Heartbeat: {"idle_s": 2, "refused_version": 2, "refusal": 2, "relay": 2, "asleep_in": 2},
    Group: {"token_versions": 2, "sampled": 2, "episodes": 2, "missing": 2},
}
"""The schema that added a field to a message, or to what is in one. Fields of schema 1 have no entry, and no entry is ever
removed, because journals stay."""

SINCE_MESSAGES: dict[type[Struct], int] = {
    PolicyRequest: 2,
    PolicyOffer: 2,
    BundleRequest: 2,
    BundleOffer: 2,
    BlobProgress: 2,
    RelayPeers: 2,
}
"""The schema that added a message. A peer of an older schema is never sent it."""


def newer_than_oldest(sampling: Sampling) -> list[str]:
    """The fields that ask for something, and that a peer of the oldest readable schema would not see."""
    plain = Sampling(sampling.num_generations, sampling.max_completion_length, sampling.temperature)
    newer = (name for name, since in SINCE[Sampling].items() if since > READABLE_SCHEMAS[0])
    return [name for name in newer if getattr(sampling, name) != getattr(plain, name)]


def group_schema(*fields: str) -> int:
    """The oldest schema that can express a Group in which these fields are not empty. Journals keep groups in it, so that the
    release before can read them too."""
    return max((SINCE[Group].get(field, 1) for field in fields), default=1)


JOURNAL_SCHEMAS = range(1, SCHEMA_VERSION + 1)
"""Those in which a journal may hold groups."""
