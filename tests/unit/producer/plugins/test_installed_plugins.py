"""A plugin that another package installs, in a folder of its own: the processes of a run find it by its entry point."""

import os
from pathlib import Path

import pytest

from producer.environments.agent_program import rows
from producer.environments.pool import EnvironmentPool
from producer.rewards.pool import RewardPool
from protocol.config.functions import make_plugin
from protocol.config.rewards import EnvironmentSection, RewardsSection
from protocol.errors import ConfigError
from tests.plugins import install
from tests.unit.producer.loop import asynchronous
from tests.unit.producer.rewards.test_rewards import Seen

PLUGIN = '''
def starts_with(letter):
    def score(completions, **columns):
        return [float(text.startswith(letter)) for text in completions]

    return score


class Counter:
    def __init__(self, start=0):
        self.start = self.count = start

    def reset(self, **columns):
        self.count = self.start
        return f"The counter is at {self.count}."

    def add(self, number: int) -> str:
        """Adds to the counter.

        Args:
            number: How much.
        """
        self.count += number
        return str(self.count)

    def get_reward(self):
        return float(self.count == 7)


def load(settings):
    class Riddles:
        def rows(self, max_rows):
            yield from ({"prompt": f"{settings['word']} {number}"} for number in range(3))

    return Riddles()
'''
GROUPS = {
    "slipstream.rewards": {"starts_with": "counting:starts_with"},
    "slipstream.environments": {"counter": "counting:Counter", "riddles": "counting:load"},
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text(PLUGIN)
    install(tmp_path, "slipstream-counting", GROUPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.long
@pytest.mark.usefixtures("installed")
@asynchronous
async def test_it_scores_in_the_reward_workers() -> None:
    function = {"function": "starts_with", "options": {"letter": "b"}}
    section = RewardsSection.model_validate({"functions": [function], "num_workers": 1})
    pool = RewardPool(section, Seen())
    try:
        await pool.start()
        scored = await pool.score("p", ["a", "bc"], [[1], [2]], {})
    finally:
        await pool.close()
    assert section.names == ("starts_with",)
    assert scored.rewards.tolist() == [[0.0], [1.0]]


@pytest.mark.long
@pytest.mark.usefixtures("installed")
@asynchronous
async def test_it_plays_in_the_environments_processes() -> None:
    section = {"factory": "counter", "options": {"start": 3}, "reward_weight": 1.0, "tool_parser": "hermes"}
    pool = EnvironmentPool(EnvironmentSection.model_validate(section))
    try:
        await pool.start()
        async with pool.session() as environment:
            assert await environment.reset({}) == "The counter is at 3."
            assert await environment.call("add", {"number": 4}) == ("7", False)
            assert await environment.reward() == 1.0
    finally:
        await pool.close()
    assert [tool["function"]["name"] for tool in pool.tools] == ["add"]


@pytest.mark.long
@pytest.mark.usefixtures("installed")
@asynchronous
async def test_it_loads_in_an_agent_program() -> None:
    section = EnvironmentSection.model_validate({"agent": "riddles", "options": {"word": "Guess"}})
    assert [row async for row in rows(section, 2, "")] == [{"prompt": "Guess 0"}, {"prompt": "Guess 1"}]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("section", "entry", "problem"),
    [
        (RewardsSection, {"functions": [{"function": "unheard"}]}, "installed: .*exact_match.*starts_with"),
        (EnvironmentSection, {"factory": "unheard"}, "installed: .*counter.*riddles.*verifiers"),
        (EnvironmentSection, {"agent": "unheard"}, "installed: .*counter.*riddles.*verifiers"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_are_installed(section, entry, problem) -> None:
    with pytest.raises(ValueError, match=rf"no installed package has a plugin `unheard`.*{problem}"):
        section.model_validate(entry)


@pytest.mark.usefixtures("installed")
def test_options_that_a_plugin_does_not_take_are_a_problem_with_the_key() -> None:
    with pytest.raises(
        ConfigError, match=r"rewards\.functions: plugin starts_with .* unexpected keyword argument 'leter'"
    ):
        make_plugin("slipstream.rewards", "starts_with", {"leter": "b"}, "rewards.functions")
