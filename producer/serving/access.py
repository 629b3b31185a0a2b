"""Who may ask the endpoint.

Guarantee: where there are keys, a request without one of them is refused, and no comparison says how much of a key was right.
Where there are none, a web page cannot send its visitor's browser here.
"""

import base64
import hmac

from starlette.datastructures import Headers
from starlette.types import Scope

from producer.calls.refusals import RefusedError, malformed
from protocol.config.sections.serve import LOOPBACK_HOSTS


def check_access(scope: Scope, keys: tuple[bytes, ...], host: str) -> None:
    """Raises RefusedError if the client may not ask, or does not declare JSON.

    Args:
        keys: of which the client has to send one; none is needed if empty.
        host: where the endpoint listens.
    """
    headers = Headers(scope=scope)
    if keys:
        sent = _sent_key(headers.get("authorization", ""))
        if not sum([hmac.compare_digest(sent, key) for key in keys]):  # all are compared, whichever fits
            raise RefusedError(401, "wrong_key", "send a key of serve.api_key_file as Authorization: Bearer KEY")
    elif _host_name(headers.get("host", "")) not in (*LOOPBACK_HOSTS, host):
        raise RefusedError(403, "wrong_host", "without a key, this endpoint answers under its own address alone")
    if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise malformed("expected Content-Type: application/json", status=415)


def _sent_key(authorization: str) -> bytes:
    """A bearer token, or the password of a URL, which is all that environments of Atropos can send."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization.removeprefix("Bearer ").encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:  # also raised for text that is not ASCII
        return b""


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
