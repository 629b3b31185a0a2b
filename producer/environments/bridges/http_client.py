"""HTTP with the standard library, in threads.

Guarantee: an answer is bounded in bytes and in time. No proxy is asked, and no redirect is followed.
"""

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_LONGEST_ANSWER_BYTES = 64 * 2**20
_PIECE_BYTES = 2**16
_JSON = {"content-type": "application/json"}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class HttpClient:
    """Asks with `num_threads` requests at once."""

    def __init__(self, num_threads: int, headers: dict[str, str] | None = None) -> None:
        self._headers = _JSON | (headers or {})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        self._threads = ThreadPoolExecutor(num_threads)

    async def ask(self, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer to a POST, or to a GET where there is no `body` to send. Raises OSError if
        there is no whole answer, or it is too long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._asked, url, body, timeout_s)

    def _asked(self, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        ends_at, content = time.monotonic() + timeout_s, bytearray()
        request = urllib.request.Request(url, body, self._headers)  # noqa: S310 - http, which the configuration has checked
        try:
            try:
                answer = self._opener.open(request, timeout=timeout_s)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                while piece := answer.read1(_PIECE_BYTES):
                    content += piece
                    if len(content) > _LONGEST_ANSWER_BYTES:
                        raise OSError(f"{url} answered with more than {_LONGEST_ANSWER_BYTES} bytes")
                    if time.monotonic() > ends_at:
                        raise TimeoutError(f"{url} did not come to the end of its answer")
                return answer.status, bytes(content)
        except http.client.HTTPException as error:
            raise OSError(f"{url}: {type(error).__name__}: {error}") from None
