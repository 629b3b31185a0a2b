"""The tokens that an engine has sampled, by its own count.

Guarantee: the count is vLLM's, in the /metrics of a server, or of a producer, which shows its engine's. It has all tokens, also
those of completions that were dropped, cut, or are not complete yet.
"""

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from slipstream.run_reader import RunReader

_COUNT = re.compile(r"^vllm:generation_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_EVERY_S = 0.5


class EngineTokens(threading.Thread):
    """A thread that asks twice a second, until its context ends. It asks the server at `url`, or the producer of the run in
    `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.url: str | None = None
        self._run = RunReader(folder)
        self._counts: list[tuple[float, int]] = [(time.time(), 0)]
        self._over = threading.Event()

    def __enter__(self) -> "EngineTokens":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    @property
    def newest(self) -> int:
        return self._counts[-1][1]

    def run(self) -> None:
        with httpx.Client(timeout=10.0) as client:
            while not self._over.wait(_EVERY_S):
                url = self.url or self._producer()
                try:
                    counts = _COUNT.findall(client.get(f"{url}/metrics").text) if url else []
                except httpx.HTTPError:  # it begins, or has ended
                    continue
                self._counts.append((time.time(), max(self.newest, int(sum(map(float, counts))))))

    def _producer(self) -> str | None:
        return next((f"http://{one.address}" for one in self._run.daemons() if one.job == "rl-producer"), None)

    def at(self, times: Sequence[float]) -> list[int]:
        """Return the count at each Unix time, in proportion between two answers."""
        asked, counts = zip(*self._counts, strict=True)
        return [round(float(count)) for count in np.interp(times, asked, counts)]
