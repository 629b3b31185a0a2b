"""A request that a client must change, or send later. Guarantee: it says so in a form that OpenAI clients understand."""

from typing import Any, Literal, get_args

Reason = Literal[
    "wrong_key",
    "wrong_host",
    "too_large",
    "malformed",
    "too_slow",
    "unknown_model",
    "unknown_episode",
    "not_sampled",
    "busy",
    "too_many_connections",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RefusedError(Exception):
    """An answer of the endpoint, not a defect.

    Args:
        status: of HTTP.
        reason: what it is counted as.
        parameter: of the request, the one at fault.
    """

    def __init__(self, status: int, reason: Reason, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.body = error_body(status, reason, message, parameter)


def error_body(status: int, kind: str, message: str, parameter: str | None = None) -> dict[str, Any]:
    """As OpenAI has it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}
