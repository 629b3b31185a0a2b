"""Requests to one server over HTTP.

Guarantee: an answer has the requested form and a bounded size, or one of the errors here describes it. The key goes to this
server alone: no redirect is followed, and no message holds it.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from protocol.channel.keys import read_private, secret_line
from protocol.config.distillation import TeacherSection
from protocol.config.environment_servers import OpenEnvOptions, SimulatedUserOptions
from protocol.config.operation import EngineServerSection
from protocol.errors import UNREADABLE, ConfigError

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0  # less than uvicorn's 5, which may close a connection just when it is used again
MAX_ERROR_CHARS = 400  # of a server's message
_MAX_BYTES = 2**22  # of an answer without completions
_UNAUTHORIZED, _BUSY = (401, 403), (429, 503)
UNFIT = (400, 413, 422)  # what a server answers to a text that it cannot take, while it takes others
_SECTION = "engine_server"

Answer = TypeVar("Answer")


class ServerLostError(Exception):
    """The server does not answer, or not in time."""


class ServerBusyError(ServerLostError):
    """The server asks for another try later, after `retry_after_s` if it gives a time."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerRefusedError(Exception):
    """The server answers, and refuses the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class ServerMismatchError(Exception):
    """Raised when this run cannot use the server; the message ends with the fix."""


def open_session(
    section: EngineServerSection | TeacherSection | OpenEnvOptions | SimulatedUserOptions, place: str = _SECTION
) -> aiohttp.ClientSession:
    """Open a session for all servers of a section, which is `place` in the file, in the running loop. Raises ConfigError if the
    key or the certificates cannot be read."""
    headers = {"Content-Type": "application/json"}
    if section.key_file is not None:
        where = f"{place}.key_file"
        key = secret_line(read_private(Path(section.key_file), where), f"{where}: {section.key_file}")
        headers["Authorization"] = f"Bearer {key}"
    try:
        trusted = ssl.create_default_context(cafile=section.ca_file)
    except OSError as error:  # ssl.SSLError, too
        raise ConfigError(f"{place}.ca_file: {section.ca_file} cannot be read: {error}") from error
    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(
        headers=headers,
        trace_configs=[redirects],
        connector=aiohttp.TCPConnector(limit=0, ssl=trusted, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
    )


async def _refuse_redirect(_session: Any, _context: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse for `ws_connect`, which has no `allow_redirects`."""
    response = redirect.response
    raise aiohttp.ClientError(
        f"status {response.status}: it points to {response.headers.get('Location')!r:.{MAX_ERROR_CHARS}}"
    )


class HttpClient:
    """Requests to one server. `url` has no slash at its end; an answer may take `limit_s` unless a request sets another limit.
    `place` is the section of the file that names the server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, limit_s: float, place: str = _SECTION) -> None:
        self._session = session
        self.url = url
        self._limit_s = limit_s
        self._place = place

    async def get(self, path: str, kind: type[Answer]) -> Answer:
        return _decoded(await self._content("GET", path, None, self._limit_s, _MAX_BYTES), kind, path)

    async def get_text(self, path: str) -> str:
        return (await self._content("GET", path, None, self._limit_s, _MAX_BYTES)).decode(errors="replace")

    async def tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a request whose answer has no content."""
        await self._content("POST", path, body, self._limit_s, _MAX_BYTES)

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[Answer],
        *,
        max_bytes: int = _MAX_BYTES,
        has_limit: bool = True,
    ) -> Answer:
        """Send a request and decode its answer. If `has_limit` is False, the caller must set a timeout."""
        limit_s = self._limit_s if has_limit else None
        return _decoded(await self._content("POST", path, body, limit_s, max_bytes), kind, path)

    async def _content(
        self, method: str, path: str, body: dict[str, Any] | None, limit_s: float | None, max_bytes: int
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, self.url + path, data=data, allow_redirects=False) as response,
            ):
                content = bytearray()
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > max_bytes:
                        raise ServerMismatchError(f"answers {path} with more than {max_bytes} bytes")
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerMismatchError(
                f"has a certificate that is not trusted ({error.certificate_error}): set {self._place}.ca_file to the "
                "certificate of its signer"
            ) from error
        except TimeoutError:
            raise ServerLostError(f"does not answer {path} in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"cannot be reached: {error or type(error).__name__}") from error
        if response.status != 200:
            raise self._error(response.status, bytes(content), response.headers.get("Retry-After", ""))
        return bytes(content)

    def _error(self, status: int, content: bytes, retry_after: str) -> Exception:
        message = _message(content)
        if status in _UNAUTHORIZED:
            return ServerMismatchError(
                f"refuses the key ({message}): write the value of the server's --api-key to {self._place}.key_file"
            )
        if status in _BUSY:
            return ServerBusyError(
                f"is busy: {message} (status {status})", float(retry_after) if retry_after.isdecimal() else None
            )
        return ServerRefusedError(status, message)


def _message(content: bytes) -> str:
    """Return the text of a refusal: vLLM sends {"error": {"message": ...}}, proxies before it send others."""
    try:
        said: Any = msgspec.json.decode(content)
        for key in ("error", "message", "detail"):
            if isinstance(said, dict) and key in said:
                said = said[key]
    except UNREADABLE:
        said = content.decode(errors="replace")
    return str(said)[:MAX_ERROR_CHARS] or "gives no reason"


def _decoded(content: bytes, kind: type[Answer], path: str) -> Answer:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise ServerMismatchError(f"answers {path} in a form that is unknown: {error}") from error
