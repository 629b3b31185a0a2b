"""The start of an agent program: what it sends is a message or a problem, and none is left behind."""

import sys

import psutil
import pytest

from producer.environments import agent_program
from producer.environments.agent_program import _start, _terminate
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous, until

SECTION = EnvironmentSection.model_validate({"agent": "verifiers", "options": {"id": "x", "python": sys.executable}})


def let_it_send(monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    """Start a program that sends this body and stays, or ends if there is none."""
    send = f"end.send(struct.pack('<I', len({body!r})) + {body!r}.encode('latin-1')); time.sleep(600)" if body else ""
    run = f"import socket, struct, sys, time; end = socket.socket(fileno=int(sys.argv[1])); end.recv(9); {send}"
    monkeypatch.setattr(agent_program, "_RUN", run)
    monkeypatch.setattr(agent_program, "_EXIT_GRACE_S", 0.05)


@pytest.mark.parametrize("body", ["Loading the dataset ...", "[1, 2]", "[" * 10_000, "\xff"])
@asynchronous
async def test_a_frame_that_is_no_object_ends_the_program_alone(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    let_it_send(monkeypatch, body)
    with pytest.raises(ConfigError, match=r"environment\.agent: verifiers: the agent program failed"):
        await _start(SECTION, {})


@asynchronous
async def test_a_program_that_cannot_be_started_is_a_problem_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("protocol.runtime.child.KeptProcess", no_process)
    with pytest.raises(ConfigError, match=r"cannot be started.*temporarily unavailable"):
        await _start(SECTION, {})


@pytest.mark.long
@pytest.mark.parametrize("body", ['{"ready": true}', '{"problem": "no"}', None])
@asynchronous
async def test_it_ends_wherever_its_start_is_cancelled(monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    """Real processes, which take their time to die."""
    let_it_send(monkeypatch, body)
    others = set(psutil.Process().children())

    async def life() -> None:
        try:
            started = await _start(SECTION, {})
        except ConfigError:
            assert body != '{"ready": true}'
        else:
            await _terminate(started)

    assert await cancel_at_each_wait(life, lambda: None) > 2
    await until(lambda: not set(psutil.Process().children()) - others)
