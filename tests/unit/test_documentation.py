"""Generated pages are current, what they claim about the schema holds, and no link leads nowhere."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from consumer.app.cli import main as consumer_main
from producer.app.cli import main as producer_main
from producer.environments.worker import Answer, Call, Environment
from protocol.check.whole import library_mistakes
from protocol.config import run as schema
from protocol.config.loader import load_config
from protocol.config.mistakes import collected
from slipstream.cli import run as run_slipstream
from slipstream.cli import slipstream

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "configuration.md"
PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream", "slipstream_extras")
_ROOT = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), *(REPOSITORY / name for name in _ROOT)]


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    assert {path.stem for path in (REPOSITORY / "docs").glob("*.md")} <= {page.name for page in site.iterdir()}


def test_the_page_is_current_and_one_that_is_not_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("generate_configuration.py", "configuration.md"):
        (tmp_path / "docs" / name).write_text((REPOSITORY / "docs" / name).read_text())
    (tmp_path / "protocol").symlink_to(REPOSITORY / "protocol")
    command = [sys.executable, "docs/generate_configuration.py"]

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    (tmp_path / "docs" / "configuration.md").write_text("old")
    checked = run("--check")
    assert (checked.returncode, checked.stderr) == (
        1,
        "docs/configuration.md is out of date: run `python docs/generate_configuration.py`\n",
    )
    assert run().returncode == 0
    assert (tmp_path / "docs" / "configuration.md").read_text() == PAGE.read_text()


def test_every_key_of_the_schema_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name, field in schema.RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        for key in inner:
            assert f"| `{name}.{key}` |" in text
        assert f"`{name}`" in text


def test_the_example_on_the_page_loads(tmp_path: Path) -> None:
    example = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(example)
    assert load_config(str(tmp_path / "run.yaml")).run_dir == str(tmp_path / "runs/gsm8k")
    assert set(yaml.safe_load(example)) == {"run_dir", "model", "dataset", "rewards"}


def test_the_first_environment_of_its_page_loads_word_for_word(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "environments.md").read_text()
    example, code = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("yaml", "python"))
    (tmp_path / "environment.py").write_text(code)
    (tmp_path / "run.yaml").write_text(
        f"run_dir: run\nmodel: {{path: model}}\ndataset: {{path: rows.jsonl}}\n{example}"
    )
    config = load_config(str(tmp_path / "run.yaml"))
    assert config.own_rewards == {"environment": 1.0}
    shop = Environment(str(tmp_path / config.environment.factory), {})
    assert shop.answer(Call("reset", arguments={"prompt": [], "stock": 3})).problem == ""
    assert shop.answer(Call("tool", "buy", {"count": 3})) == Answer("0 are left")
    assert shop.answer(Call("reward")) == Answer(1.0)


def test_the_readmes_run_loads_and_its_reward_is_for_its_row(tmp_path: Path) -> None:
    """`tests/integration/test_readme.py` runs it."""
    blocks = dict(re.findall(r"```(json|yaml)\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL))
    (tmp_path / "run.yaml").write_text(blocks["yaml"])
    config, row = load_config(str(tmp_path / "run.yaml")), json.loads(blocks["json"])
    assert config.dataset.path == str(tmp_path / "train.jsonl")
    options = config.rewards.functions[0].settings
    assert row.keys() == {config.dataset.prompt_column, options.column}  # type: ignore[union-attr]


def test_sections_that_pages_show_have_known_keys_and_values() -> None:
    """What they need of other sections is on the page in words."""
    base = {
        "run_dir": "run",
        "model": {"path": "m"},
        "dataset": {"path": "d"},
        "rewards": {"functions": [{"function": "exact_match"}]},
    }
    mistakes, blocks = (
        [],
        [block for page in PAGES for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)],
    )
    for block in blocks:
        with contextlib.suppress(yaml.YAMLError):
            shown = yaml.safe_load(block)
            if isinstance(shown, dict) and set(map(str, shown)) <= schema.RunConfig.model_fields.keys():
                values = base | shown
                mistakes += [*collected(schema.RunConfig, values).mistakes, *library_mistakes(values)]
    invented = "no installed package"  # plugins that a page tells how to write
    assert [mistake for mistake in mistakes if not mistake.names_key and invented not in mistake.text] == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            place = page.parent / name if name else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_every_row_of_a_table_stands_below_its_head() -> None:
    """A blank line ends a table: rows behind it are shown as text. Without one, the next table's head is a row of this one."""
    loose = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            rows = enumerate(table.splitlines())
            rules = [number for number, row in rows if re.fullmatch(r"\|(?:\s*:?-+:?\s*\|)+", row)]
            loose += [f"{page.name}: {table[:60]}"] if rules != [1] else []
    assert loose == []


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """Slipstream is installed from its checkout."""
    files = [*PAGES, *(file for name in PACKAGES for file in (REPOSITORY / name).rglob("*.py"))]
    assert [str(file) for file in files if re.search(r"pip install '?slipstream", file.read_text())] == []


def test_every_module_and_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    packages = (
        "protocol|replay|producer|consumer|slipstream|slipstream_extras|campaigns|benchmarks|examples|docs|deploy|tests"
    )
    gone = []
    for page in PAGES:
        text = page.read_text()
        places = set(re.findall(rf"`((?:{packages})/[\w./-]+)`", text))
        places |= {place.replace(".", "/") + "*" for place in re.findall(rf"python -m ((?:{packages})[\w.]+)", text)}
        gone += [f"{page.name}: {place}" for place in places if not any(REPOSITORY.glob(place.rstrip("/")))]
        gone += [f"{page.name}: make {name}" for name in re.findall(r"`make ([\w-]+)", text) if name not in targets]
    assert gone == []


def test_every_flag_of_a_command_that_a_page_shows_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_logging: None
) -> None:
    """Of our own commands, in blocks and within a line."""
    shown: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        pattern = r"\b(rl-trainer|rl-producer|slipstream(?= [a-z]))((?:[ \t]+[^\s`#|&;]+)*)"
        for program, rest in re.findall(pattern, page.read_text()):
            words = rest.split()
            flags = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}
            if path := _command_path(program, words):
                shown.setdefault(path, set()).update(flags)
    assert len(shown) > 15
    for (program, *subcommand), flags in shown.items():
        known = _help(program, subcommand, monkeypatch, capsys)
        for flag in flags:
            assert flag in known, f"{program} {subcommand} {flag}"


def _command_path(program: str, words: list[str]) -> tuple[str, ...]:
    """The program with its subcommands; () for a text that only mentions the name."""
    command: click.Command | None = slipstream if program == "slipstream" else None
    path = [program]
    for word in words:
        if not isinstance(command, click.Group):
            break
        if (inner := command.get_command(click.Context(command), word)) is not None:
            command = inner
            path.append(word)
    return () if path == ["slipstream"] else tuple(path)


def _help(
    program: str, subcommand: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Of a subcommand and of what it is a subcommand of."""
    if program == "slipstream":
        for end in range(1, len(subcommand) + 1):
            assert run_slipstream([*subcommand[:end], "--help"]) == 0
    else:
        monkeypatch.setattr(sys, "argv", [program, "--help"])
        with pytest.raises(SystemExit):
            {"rl-trainer": consumer_main, "rl-producer": producer_main}[program]()
    return capsys.readouterr().out
