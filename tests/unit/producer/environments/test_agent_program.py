"""What an agent program says, and what becomes of a producer by it."""

import asyncio
import sys

import psutil
import pytest

from producer.environments import agent_program
from producer.environments.agent_program import _Program
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous, until

SECTION = EnvironmentSection.model_validate({"agent": "verifiers", "options": {"id": "x", "python": sys.executable}})


def let_it_say(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """A program that answers with this line and stays, or ends if there is none."""
    says = f"print({word!r}, flush=True)\ntime.sleep(600)" if word else ""
    program = f"import sys, time\nsys.stdin.readline()\n{says}"
    monkeypatch.setattr(agent_program, "_RUN", program)
    monkeypatch.setattr(agent_program, "_EXIT_GRACE_S", 0.05)


@pytest.mark.parametrize("word", ["Loading the dataset ...", "[1, 2]", "[" * 100_000, "\xff"])
def test_a_line_that_is_no_object_is_shown_and_ends_the_program_alone(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    let_it_say(monkeypatch, word)
    with pytest.raises(
        ConfigError, match=r"environment\.agent: verifiers: the agent program sent .* belongs on standard error"
    ):
        asyncio.run(_Program.start(SECTION, {}))


def test_a_program_that_cannot_be_started_is_a_problem_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(agent_program, "KeptProcess", no_process)
    with pytest.raises(ConfigError, match=r"cannot be started.*temporarily unavailable"):
        asyncio.run(_Program.start(SECTION, {}))


@pytest.mark.long
@pytest.mark.parametrize("word", ['{"ready": true}', '{"problem": "no"}', ""])
@asynchronous
async def test_it_ends_wherever_its_start_is_cancelled(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Real processes, which take their time to die."""
    let_it_say(monkeypatch, word)
    others = set(psutil.Process().children())

    async def life() -> None:
        try:
            started = await _Program.start(SECTION, {})
        except ConfigError:
            assert word != '{"ready": true}'
        else:
            await started.terminate()

    assert await cancel_at_each_wait(life, lambda: None) > 2
    await until(lambda: not set(psutil.Process().children()) - others)
