"""Requests to one server.

Guarantee: an answer is of the form that was asked for and of bounded size, or one of the errors here says what there was instead.
The key goes to this server alone: no redirect is followed, and no message holds it.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from protocol.channel.keys import read_private, secret_line
from protocol.config.operation import EngineServerSection
from protocol.errors import UNREADABLE, ConfigError

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0  # less than uvicorn's 5, which may close a connection just when it is used again
_SHOWN = 400  # characters of what a server says
_MAX_BYTES = 2**22  # of an answer, but for what was generated
_UNAUTHORIZED, _BUSY = (401, 403), (429, 503)
_KEY = "engine_server.key_file"

Answer = TypeVar("Answer")


class ServerLostError(Exception):
    """It does not answer, or not in time."""


class ServerBusyError(ServerLostError):
    """It asks for another try later, after `retry_after_s` if it says so."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerRefusedError(Exception):
    """It answers, and does not do what was asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class ServerMismatchError(Exception):
    """It is no server that this run can use; the message ends with what to change."""


def open_session(section: EngineServerSection) -> aiohttp.ClientSession:
    """For all servers of the section, in the running loop. Raises ConfigError where the key or the certificates cannot be
    read."""
    headers = {"Content-Type": "application/json"}
    if section.key_file is not None:
        key = secret_line(read_private(Path(section.key_file), _KEY), f"{_KEY}: {section.key_file}")
        headers["Authorization"] = f"Bearer {key}"
    try:
        trusted = ssl.create_default_context(cafile=section.ca_file)
    except OSError as error:  # ssl.SSLError, too
        raise ConfigError(f"engine_server.ca_file: {section.ca_file} cannot be read: {error}") from error
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, ssl=trusted, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
    )


class HttpClient:
    """`url` has no slash at its end; `limit_s` is how long an answer may take unless a request says otherwise."""

    def __init__(self, session: aiohttp.ClientSession, url: str, limit_s: float) -> None:
        self._session = session
        self.url = url
        self._limit_s = limit_s

    async def get(self, path: str, kind: type[Answer]) -> Answer:
        return _decoded(await self._content("GET", path, None, self._limit_s, _MAX_BYTES), kind, path)

    async def get_text(self, path: str) -> str:
        return (await self._content("GET", path, None, self._limit_s, _MAX_BYTES)).decode(errors="replace")

    async def tell(self, path: str, body: dict[str, Any]) -> None:
        """For requests whose answer is no more than a yes."""
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
        """Without a limit the caller has one."""
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
                f"has a certificate that is not trusted ({error.certificate_error}): set engine_server.ca_file to the "
                "certificate of whoever signed it"
            ) from error
        except TimeoutError:
            raise ServerLostError(f"does not answer {path} in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"cannot be reached: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _error(response.status, bytes(content), response.headers.get("Retry-After", ""))
        return bytes(content)


def _error(status: int, content: bytes, retry_after: str) -> Exception:
    message = _message(content)
    if status in _UNAUTHORIZED:
        return ServerMismatchError(f"refuses the key ({message}): {_KEY} has to hold what the server's --api-key says")
    if status in _BUSY:
        return ServerBusyError(
            f"is busy: {message} (status {status})", float(retry_after) if retry_after.isdecimal() else None
        )
    return ServerRefusedError(status, message)


def _message(content: bytes) -> str:
    """The text in an answer that refuses: vLLM has {"error": {"message": ...}}, what stands before it has others."""
    try:
        said: Any = msgspec.json.decode(content)
        for key in ("error", "message", "detail"):
            if isinstance(said, dict) and key in said:
                said = said[key]
    except UNREADABLE:
        said = content.decode(errors="replace")
    return str(said)[:_SHOWN]


def _decoded(content: bytes, kind: type[Answer], path: str) -> Answer:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise ServerMismatchError(f"answers {path} as no vLLM does: {error}") from error
