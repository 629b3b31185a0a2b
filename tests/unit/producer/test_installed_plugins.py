"""The plugin of docs/plugins.md, installed in a folder of its own: the processes of a run find it by its entry point."""

import os
import tomllib
from pathlib import Path

import pytest
import yaml

from producer.environments.agent_program import rows
from producer.environments.pool import EnvironmentPool
from producer.rewards.pool import RewardPool
from protocol.config.functions import make_plugin
from protocol.config.rewards import EnvironmentSection, RewardsSection
from protocol.errors import ConfigError
from tests.plugins import install
from tests.unit.producer.loop import asynchronous
from tests.unit.producer.rewards.test_rewards import Seen

PAGE = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
AGENT = """
def load(settings):
    class Riddles:
        def rows(self, max_rows):
            yield from ({"prompt": f"{settings['word']} {number}"} for number in range(3))

    return Riddles()
"""


def example(language: str) -> str:
    """The first block of this language on the page about plugins."""
    return PAGE.split(f"```{language}\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads(example("toml"))["project"]
    project["entry-points"]["slipstream.environments"]["riddles"] = "words:load"
    (tmp_path / "words.py").write_text(example("python") + AGENT)
    install(tmp_path, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.long
@pytest.mark.usefixtures("installed")
@asynchronous
async def test_it_scores_in_the_reward_workers() -> None:
    section = RewardsSection.model_validate(yaml.safe_load(example("yaml"))["rewards"] | {"num_workers": 1})
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
    pool = EnvironmentPool(EnvironmentSection.model_validate(yaml.safe_load(example("yaml"))["environment"]))
    try:
        await pool.start()
        async with pool.session() as environment:
            assert await environment.reset({}) is None
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
        (EnvironmentSection, {"factory": "unheard"}, "installed: .*counter.*riddles"),
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
