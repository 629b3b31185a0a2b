"""Who may ask the server, and what a browser may do with its answers.

Guarantee: a request is refused unless it is a GET, its `Host` is a name of loopback (so no name that a stranger's DNS server
gives this machine helps), it comes from no other origin, and it has the token, as `?token=` or in the cookie that this sets.
Every answer forbids what the pages do not need: scripts and styles from elsewhere or inside the page, frames, caches.
"""

import hashlib
import secrets
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OWN_SITES = (
    "same-origin",
    "none",
    "",
)  # what browsers say of a request: from here, typed or from a bookmark, or nothing


class Guard:
    """The ASGI application in front of `app`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        # Cookies know no ports, so each viewer has one of its own.
        self._cookie = f"slipstream-{hashlib.sha256(self._token).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) or self._entry(scope) or self._app

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name(host) not in _LOOPBACK:
            return PlainTextResponse(
                "the Host header names no loopback address; open the URL that slipstream view printed\n", 421
            )
        origin = headers.get("origin")
        if (origin is not None and origin != f"http://{host}") or headers.get("sec-fetch-site", "") not in _OWN_SITES:
            return PlainTextResponse("requests from other pages are refused; type or paste the URL\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("GET\n", 405, {"allow": "GET"})
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """The answer to a request that has its token in the URL, or none; None if the cookie has it."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens:
            if not secrets.compare_digest(tokens[0].encode(), self._token):
                return _no_token()
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = "/" + scope["path"].lstrip("/")  # two slashes would begin the name of another host
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, tokens[0], httponly=True, samesite="strict")
            return answer
        cookie = HTTPConnection(scope).cookies.get(self._cookie, "")
        return None if secrets.compare_digest(cookie.encode(), self._token) else _no_token()


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _no_token() -> Response:
    return PlainTextResponse(
        "the token is missing or wrong; open the URL that slipstream view printed when it started\n", 403
    )
