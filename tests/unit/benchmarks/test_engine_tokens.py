"""Tokens that an engine has sampled, by the time."""

import time
from pathlib import Path

import httpx
import pytest

from benchmarks.engine_tokens import EngineTokens

PAGE = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {}
vllm:generation_tokens_total{{engine="1",model_name="m"}} 5.0
vllm:generation_tokens_created{{engine="0"}} 1.7e+09
"""


class Server:
    """Answers as two engines do that have sampled more each time, and is gone in the end."""

    def __init__(self, **_: object) -> None:
        self.pages = ["", PAGE.format("15.0"), PAGE.format("1.0e+02")]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None: ...

    def get(self, url: str) -> httpx.Response:
        assert url == "http://here/metrics"
        if not self.pages:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text=self.pages.pop(0))


def test_the_count_is_that_of_all_engines_and_grows_between_two_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, clock = EngineTokens(tmp_path), iter([1.0, 2.0, 4.0])
    tokens.url = "http://here"
    began = time.time()
    monkeypatch.setattr("benchmarks.engine_tokens.httpx.Client", Server)
    waits = iter([False] * 5 + [True])
    monkeypatch.setattr(tokens, "_over", type("Over", (), {"wait": lambda self, seconds: next(waits)})())
    monkeypatch.setattr("benchmarks.engine_tokens.time.time", lambda: began + next(clock))
    tokens.run()
    assert tokens.newest == 105
    assert tokens.at([began + seconds for seconds in (0.5, 1.0, 1.5, 2.0, 3.0, 9.0)]) == [0, 0, 10, 20, 62, 105]
