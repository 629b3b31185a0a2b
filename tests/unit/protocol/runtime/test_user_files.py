"""Files of the user's that are called like our packages stand beside the run, and break no process that runs the user's code."""

import sys
from pathlib import Path

import pytest

from producer.environments.agent_program import rows
from producer.environments.pool import EnvironmentPool
from producer.rewards.messages import Job, Source
from producer.rewards.workers import WorkerPool
from protocol.config.functions import load_function
from protocol.config.rewards import EnvironmentSection
from protocol.errors import BundleError, ConfigError
from slipstream_extras.bundle.sources import RunSources
from tests.plugins import install
from tests.unit.producer.loop import asynchronous
from tests.unit.test_house import MODULES, PACKAGES

REWARDS = "from tools import BONUS\nfrom utils import length\ndef score(completions, **_):\n"
REWARDS += "    return [BONUS + length(each) for each in completions]\n"
ENVIRONMENT = "from tools import BONUS\nclass Game:\n    def reset(self, **_):\n        return str(BONUS)\n"

AGENT = "def load(_):\n    import tools\n    return type('Game', (), {'rows': lambda *_: [{'prompt': str(tools.BONUS)}]})()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('a file of the user\\'s was taken for ours')\n")
    (tmp_path / "tools.py").write_text("BONUS = 100\n")
    (tmp_path / "utils.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("place", ["rewards.py:score", "rewards:score"])
@asynchronous
async def test_a_reward_imports_what_stands_beside_it(folder: Path, place: str) -> None:
    workers = WorkerPool({"score": Source(place)}, 1, None, 60.0)
    try:
        await workers.start()
        [scores] = await workers.call([0], [Job("p", ["a", "bc"], [[1], [2]], {})], [60.0])
    finally:
        await workers.close()
    assert scores.rewards == [101.0, 102.0]


@pytest.mark.long
@asynchronous
async def test_a_file_with_the_name_of_one_of_our_packages_works_as_a_named_file(folder: Path) -> None:
    for package in PACKAGES:
        (folder / f"{package}.py").write_text("from tools import BONUS\ndef reward(**_):\n    return [BONUS]\n")
    workers = WorkerPool({package: Source(f"{package}.py:reward") for package in PACKAGES}, 1, None, 60.0)
    try:
        await workers.start()
        for number in range(len(PACKAGES)):
            [scores] = await workers.call([number], [Job("p", ["a"], [[1]], {})], [60.0])
            assert scores.rewards == [100.0]
    finally:
        await workers.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "statement"),
    [
        *((package, "import {}") for package in PACKAGES),
        ("protocol", "from {} import helper"),
        ("protocol", "def late():\n    import {}.helper"),
    ],
)
def test_a_sibling_that_imports_it_by_a_name_that_is_ours_is_refused(
    folder: Path, statement: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{package}.py").write_text("def helper():\n    return 1\n")
    name = f"sibling_{package}_{len(statement)}"
    (folder / f"{name}.py").write_text(f"{statement.format(package)}\ndef reward(**_):\n    return [1]\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for place in (f"{name}.py:reward", f"{name}:reward"):
        with pytest.raises(
            ConfigError, match=rf"rewards: .*{name}.py imports `{package}`.*give your file another name"
        ):
            load_function(place, "rewards")
    with pytest.raises(BundleError, match=rf"import `{package}`.*give your file another name"):
        RunSources(folder).add_function(f"{name}.py:reward", "rewards")
    sys.modules.pop(name, None)
    sys.modules.pop(f"slipstream_user_{name}", None)


@pytest.mark.long
@asynchronous
async def test_an_environment_imports_what_stands_beside_it(folder: Path) -> None:
    pool = EnvironmentPool(EnvironmentSection(factory="environment:Game"))
    try:
        async with pool.session() as environment:
            assert await environment.reset({}) == "100"
    finally:
        await pool.close()


@pytest.mark.long
@asynchronous
async def test_an_agent_program_finds_our_modules_first_and_then_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "queue.py").write_text("raise RuntimeError('a file of the user\\'s was taken for one of Python\\'s')\n")
    place = folder / "installed"
    install(place, "game", {"slipstream.environments": {"game": "game_plugin:load"}})
    (place / "game_plugin.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(place))
    section = EnvironmentSection.model_validate({"agent": "game"})
    assert [row async for row in rows(section, None, "")] == [{"prompt": "100"}]


def test_no_process_of_ours_looks_for_our_modules_in_the_users_folder() -> None:
    assert [file for file in MODULES if '[sys.executable, "-m"' in file.read_text()] == [], "start it with -P -m"
