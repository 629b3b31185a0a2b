"""The versions of the wire, and what each has brought.

Guarantee: this release talks with the one before. A change of the wire adds fields with defaults at the end of a message,
names them in `SINCE` and raises `SCHEMA_VERSION` by one.
"""

from msgspec import Struct

from protocol.wire.messages import Group, Heartbeat, Hello, Lease, Policy, PolicyOffer, PolicyRequest

SCHEMA_VERSION = 2
READABLE_SCHEMAS = (SCHEMA_VERSION - 1, SCHEMA_VERSION)
"""What a peer may speak: this release's schema, or that of the release before."""

SINCE: dict[type[Struct], dict[str, int]] = {
    Hello: {"release": 2, "swap_mode": 2, "evaluates": 2, "run_id": 2},
    Lease: {"evaluates": 2},
    Policy: {"evaluates": 2},
    Heartbeat: {"idle_s": 2, "refused_version": 2, "refusal": 2},
    Group: {"token_versions": 2, "sampled": 2, "episodes": 2},
}
"""The schema that brought a field, of those that are not in schema 1. Entries stay for ever, because journals do."""

SINCE_MESSAGES: dict[type[Struct], int] = {PolicyRequest: 2, PolicyOffer: 2}
"""The schema that brought a message, of those that are not in schema 1; a peer of an older one is never sent it."""


def group_schema(*fields: str) -> int:
    """The oldest schema that says all of a Group in which these fields are not empty. Journals keep groups in it, so that the
    release before reads them too where it can."""
    return max((SINCE[Group].get(field, 1) for field in fields), default=1)


JOURNAL_SCHEMAS = range(1, SCHEMA_VERSION + 1)
"""Those in which a journal may hold groups."""
