"""Files of the user's that are called like our packages stand beside the run, and break no process that runs the user's code."""

from pathlib import Path

import pytest

from producer.environments.agent_program import rows
from producer.environments.pool import EnvironmentPool
from producer.rewards.worker import Job, Source
from producer.rewards.workers import WorkerPool
from protocol.config.rewards import EnvironmentSection
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
