"""What a rank that fails says, and when."""

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from consumer.ranks.presence import LOST, report_failure, silence_s

from .dictionary_store import DictionaryStore
from .test_presence import GLOO_ERROR


class Ended(BaseException):
    """The process ended."""


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which the process slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=Ended))
    return slept


def said_after(error: Exception) -> str:
    store = DictionaryStore()
    with pytest.raises(Ended), report_failure(store, 3, 30.0):
        raise error
    os._exit.assert_called_once_with(70)  # type: ignore[attr-defined]
    return store.get(LOST).decode()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "rank 3 ended (MemoryError)"),
        (torch.OutOfMemoryError("CUDA out of\nmemory."), "rank 3 ended (OutOfMemoryError: CUDA out of memory.)"),
        (ValueError("x" * 501), f"rank 3 ended (ValueError: {'x' * 500})"),
    ],
)
def test_a_rank_that_fails_says_why_at_once(waited: list[float], error: Exception, said: str) -> None:
    assert said_after(error) == said
    assert waited == []


@pytest.mark.parametrize("error", [GLOO_ERROR, dist.DistBackendError("NCCL error")])
def test_one_that_lost_the_connection_to_another_leaves_the_word_to_that_first(
    waited: list[float], error: Exception
) -> None:
    assert said_after(error).startswith(f"rank 3 ended ({type(error).__name__}: ")
    assert waited == [31.0]


def test_hosts_are_waited_for_longer_than_processes() -> None:
    assert silence_s(None, 1) < 10 < 30 < silence_s(None, 2)
    assert silence_s(3.0, 1) == silence_s(3.0, 2) == 3.0


def test_a_rank_that_does_not_fail_says_nothing(waited: list[float]) -> None:
    store = DictionaryStore()
    with report_failure(store, 3, 30.0):
        pass
    assert not store.check([LOST])
    assert waited == []
