"""Both ends of channels over real sockets."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.protocol.channel_harness import Harness


@pytest.fixture(params=["ipc", "tcp"])
def harness(request: pytest.FixtureRequest, short_dir: Path, stack: ExitStack) -> Harness:
    return Harness(request.param, short_dir, stack)


@pytest.fixture
def ipc(short_dir: Path, stack: ExitStack) -> Harness:
    return Harness("ipc", short_dir, stack)


@pytest.fixture
def tcp(short_dir: Path, stack: ExitStack) -> Harness:
    return Harness("tcp", short_dir, stack)
