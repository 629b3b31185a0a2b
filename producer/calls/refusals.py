"""Why a request of a client is refused.

Guarantee: the answer says what to change, in a form that OpenAI clients understand.
"""

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
    """An answer of the endpoint, not a defect. `reason` is what the refusal is counted as, `parameter` the field at fault."""

    def __init__(self, status: int, reason: Reason, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.body = error_body(status, reason, message, parameter)


def malformed(message: str, parameter: str | None = None, status: int = 400) -> RefusedError:
    return RefusedError(status, "malformed", message, parameter)


def error_body(status: int, kind: str, message: str, parameter: str | None = None) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}
