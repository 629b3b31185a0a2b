"""Why a connection of a ZeroMQ server ended, as far as somebody was refused.

Guarantee: what libzmq reports is taken as it is. Where it says nothing, the reason follows from who hung up first and from what
Linux counted.
"""

import time

import zmq

from protocol.transport.watched_connection import WatchedConnection

HANDSHAKE_S = 5.0  # given to libzmq, which ends what takes longer
MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x1100_0002, 0x1100_0001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_PROTOCOL_FAILURES = {_MECHANISM_MISMATCH: "no_key", _CRYPTOGRAPHIC: "wrong_server_key"}


def reason_of_end(
    event: int,
    value: int,
    connection: WatchedConnection | None,
    *,
    is_finished: bool,
    has_keys: bool,
    can_authenticate: bool,
) -> str | None:
    """One of `protocol.security.rejections`; None if nobody was refused, or the authenticator has counted it. `event` and `value`
    are of the failed handshake, 0 if none failed; `is_finished` is said of the handshake."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return _PROTOCOL_FAILURES.get(value, "bad_handshake")
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return None
    if event and not can_authenticate:
        return "authenticator_dead"
    if connection is None:
        return None
    counts = connection.byte_counts()
    if connection.peer_left():
        left_at_greeting = has_keys and counts is not None and 64 <= counts[1] < 200
        return "no_key" if event and left_at_greeting else None  # it learned from ours that it needs one
    if not event:
        return "oversized" if is_finished else "bad_handshake"
    return "handshake_timeout" if time.monotonic() - connection.accepted_at > HANDSHAKE_S - 0.5 else "bad_handshake"
