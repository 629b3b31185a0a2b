"""Each example has a page, and each command of these pages starts a run that the loader accepts."""

import re
import shlex
from pathlib import Path

import pytest

from examples.math.task import to_prompt
from protocol.config.loader import load_config
from slipstream.run import run

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted((REPOSITORY / "examples").glob("*/README.md"))
COMMANDS = sorted({command for page in PAGES for command in re.findall(r"`slipstream run ([^`]+)`", page.read_text())})


def test_each_example_has_a_page() -> None:
    assert {page.parent for page in PAGES} == {file.parent for file in (REPOSITORY / "examples").glob("*/run.yaml")}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_are_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    options = run.make_context("run", shlex.split(command)).params
    config = load_config(options["config"], list(options["overrides"]))
    assert Path(config.run_dir).parent == REPOSITORY / "runs"


def test_harbors_run_reads_the_rows_where_its_page_writes_them() -> None:
    folder = REPOSITORY / "examples" / "harbor"
    [rows] = re.findall(r"--rows TASKS > (\S+)", (folder / "README.md").read_text())
    assert load_config(str(folder / "run.yaml")).dataset.path == str(REPOSITORY / rows)


def test_the_published_recipe_reads_the_rows_of_its_dataset() -> None:
    prompt = [{"role": "user", "content": "What is 3 + 4? Put the answer within \\boxed{}."}]
    row = {"data_source": "math", "prompt": prompt, "reward_model": {"ground_truth": "7", "style": "rule"}}
    assert to_prompt(row) == {"prompt": prompt, "answer": "7"}
