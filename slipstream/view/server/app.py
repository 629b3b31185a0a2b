"""The application: which page is at which address, and how it is served.

Guarantee: an error that a user can act on is a page that says so; any other is answered with 500, and its traceback goes to
standard error. Pages are made on threads, so that none delays another.
"""

import asyncio
import secrets
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from protocol.errors import JournalError
from protocol.runtime.http_server import ConnectionLimiter, Server, listen
from slipstream.view.index.cache import DamagedIndexError, SlowQueryError
from slipstream.view.pages.forms import FormError
from slipstream.view.server.compare_pages import ComparePages
from slipstream.view.server.group_pages import GroupPages
from slipstream.view.server.history_pages import HistoryPages
from slipstream.view.server.rendering import STATIC, page
from slipstream.view.server.run_pages import RunPages
from slipstream.view.server.security import Guard
from slipstream.view.server.viewer import Viewer

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
    """Of as many digits as SQLite takes."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _Number())


def application(viewer: Viewer, token: str, other: Viewer | None = None) -> ASGIApp:
    """Answers those who have the token. `other` is another run to compare with."""
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
            request, "problem.html", viewer.name, 500, text="a bug of slipstream view; its standard error says more"
        )

    def keys(request: Request) -> Response:
        return page(request, "keys.html", viewer.name)

    routes = [
        Route("/", run.run),
        Route("/live", run.live),
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
    """Serves the first run, beside which there may be another to compare with, until the process is interrupted.
    `EndpointInUseError` if another process has the port."""
    token = secrets.token_urlsafe(32)
    limiter = ConnectionLimiter(_HEADERS_S, _ANSWER_S, _MAX_CONNECTIONS, on_refused=lambda reason: None)
    with listen("127.0.0.1", port, "--port", "--port") as door, ExitStack() as stack:
        for viewer in viewers:
            stack.enter_context(viewer.builder())
        server = Server(application(viewers[0], token, *viewers[1:]), limiter)
        asyncio.run(_serve(server, door, lambda place: say_url(f"{place}/?token={token}")))


async def _serve(server: Server, door: socket.socket, say_place: Callable[[str], None]) -> None:
    """Until a signal comes. An interrupt as an exception would be lost in a request that is answered at that moment."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    say_place(f"http://127.0.0.1:{door.getsockname()[1]}")
    await server.serve([door])
