"""The application: the pages, their addresses, and the way in which they are served.

Guarantee: an error that a user can act on is a page; any other is answered with 500, and its traceback goes to
standard error. Pages are made on threads, so that none delays another.
"""

import asyncio
import hashlib
import secrets
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import JournalError
from protocol.runtime.http_server import ConnectionLimiter, Server, listen
from protocol.runtime.signals import call_on_signals
from slipstream_extras.view.index.cache import DamagedIndexError, SlowQueryError
from slipstream_extras.view.pages.forms import FormError
from slipstream_extras.view.server.compare_pages import ComparePages
from slipstream_extras.view.server.group_pages import GroupPages, HistoryPages
from slipstream_extras.view.server.rendering import STATIC, page
from slipstream_extras.view.server.run_pages import RunPages
from slipstream_extras.view.server.viewer import Viewer

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
)  # the origin of a request: from here, typed or from a bookmark, or nothing


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


_HEADERS_S, _ANSWER_S = 10.0, 60.0
_MAX_CONNECTIONS = 64
_CODES: dict[type[Exception], int] = {
    FormError: 400,
    JournalError: 404,
    FileNotFoundError: 404,
    SlowQueryError: 503,
    DamagedIndexError: 503,
}


class _Number(IntegerConvertor):
    """A number of as many digits as SQLite takes."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _Number())


def application(viewer: Viewer, token: str, other: Viewer | None = None) -> ASGIApp:
    """Answer those who have the token. `other` is another run to compare with."""
    run, groups, history, compared = (
        RunPages(viewer),
        GroupPages(viewer),
        HistoryPages(viewer),
        ComparePages(viewer, other),
    )

    def problem(request: Request, error: Exception) -> Response:
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        return page(request, "problem.html", viewer.name, code, text=str(error))

    def bug(request: Request, error: Exception) -> Response:
        traceback.print_exception(error)
        return page(
            request, "problem.html", viewer.name, 500, text="a bug of slipstream view; its standard error has more"
        )

    def keys(request: Request) -> Response:
        return page(request, "keys.html", viewer.name)

    routes = [
        Route("/", run.run),
        Route("/live", run.live),
        Route("/numbers", run.numbers),
        Route("/worth", run.worth),
        Route("/data", run.data),
        Route("/steps", run.steps),
        Route("/steps/{step:number}", run.step),
        Route("/policies", run.policies),
        Route("/groups", groups.groups),
        Route("/group", groups.group),
        Route("/prompts/{prompt:number}", history.prompt),
        Route("/compare", compared.compare),
        Route("/keys", keys),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={**dict.fromkeys(_CODES, problem), Exception: bug}), token)


def serve(viewers: list[Viewer], port: int, say_url: Callable[[str], None]) -> None:
    """Serve the first run, beside which there may be another to compare with, until the process is interrupted.
    `EndpointInUseError` if another process has the port."""
    token = secrets.token_urlsafe(32)
    limiter = ConnectionLimiter(_HEADERS_S, _ANSWER_S, _MAX_CONNECTIONS, on_refused=lambda reason: None)
    with listen("127.0.0.1", port, "--port", "--port") as door, ExitStack() as stack:
        for viewer in viewers:
            stack.enter_context(viewer.builder())
        server = Server(application(viewers[0], token, *viewers[1:]), limiter)
        asyncio.run(_serve(server, door, lambda place: say_url(f"{place}/?token={token}")))


async def _serve(server: Server, door: socket.socket, say_place: Callable[[str], None]) -> None:
    """Serve until a signal comes."""
    call_on_signals(asyncio.get_running_loop(), lambda number: setattr(server, "should_exit", True))
    say_place(f"http://127.0.0.1:{door.getsockname()[1]}")
    await server.serve([door])
