"""What an agent program says, and what becomes of a producer by it."""

import asyncio
import sys

import pytest

from producer.environments import agent_program
from protocol.config.sections.environment import EnvironmentSection
from protocol.errors import ConfigError


@pytest.mark.parametrize("word", ["Loading the dataset ...", "[1, 2]", "[" * 100_000, "\xff"])
def test_a_line_that_is_no_object_is_shown_and_ends_the_program_alone(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    program = f"import sys, time\nsys.stdin.readline()\nprint({word!r}, flush=True)\ntime.sleep(600)"
    monkeypatch.setattr("producer.environments.agent_program._EXIT_GRACE_S", 0.0)
    monkeypatch.setattr("producer.environments.agent_program._RUN", program.replace("{", "{{").replace("}", "}}"))
    section = EnvironmentSection.model_validate({"verifiers": {"id": "x", "python": sys.executable}})
    with pytest.raises(
        ConfigError, match=r"environment\.verifiers: the agent program sent .* belongs on standard error"
    ):
        asyncio.run(agent_program._Program.start(section, {}))


def test_a_program_that_cannot_be_started_is_a_problem_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("producer.environments.agent_program.KeptProcess", no_process)
    section = EnvironmentSection.model_validate({"verifiers": {"id": "x", "python": sys.executable}})
    with pytest.raises(ConfigError, match=r"cannot be started.*temporarily unavailable"):
        asyncio.run(agent_program._Program.start(section, {}))
