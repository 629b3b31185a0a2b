"""Grafana's own types judge the dashboards."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools import give_up, require

REPOSITORY = Path(__file__).parents[2]
DASHBOARDS = sorted((REPOSITORY / "deploy" / "grafana" / "dashboards").glob("*.json"))
PACKAGES = ("@grafana/schema@11.6.16", "typescript@5.8.3")

MISTAKES = (
    ('"displayMode": "list"', '"displayMode": "lists"'),
    ('"displayMode": "list"', '"display": "list"'),
    ('"graphTooltip": 1', '"graphTooltip": 7'),
    ('"type": "timeseries"', '"type": "timeserie"'),
    ('"refId": "A"', '"ref": "A"'),
    ('"fillOpacity": 0', '"fillOpacity": "0"'),
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TypeScript and Grafana's types."""
    require("npm", "npm")
    folder = tmp_path_factory.mktemp("types")
    shutil.copy(Path(__file__).parent / "grafana" / "board.ts", folder)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
    try:
        subprocess.run([*command, *PACKAGES], check=True, timeout=120, capture_output=True)
    except subprocess.SubprocessError as error:
        give_up(f"npm cannot install {PACKAGES}: {error}")
    return folder


def complaints(project: Path, documents: list[str]) -> dict[int, str]:
    """What TypeScript says first of each of these, by place. They are written down as literals, one per line: of an imported
    file it would not know a word from any text.
    """
    lines = [f"export const board{place}: Board = {' '.join(text.split())};\n" for place, text in enumerate(documents)]
    (project / "check.ts").write_text("".join([*lines, 'import type { Board } from "./board";\n']))
    compiler = [
        "node",
        "node_modules/typescript/bin/tsc",
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--pretty",
        "false",
    ]
    checked = subprocess.run(
        [*compiler, "--module", "esnext", "--moduleResolution", "node", "--target", "es2022", "check.ts"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.findall(r"^check\.ts\((\d+),\d+\): (.*)$", checked.stdout, re.MULTILINE)
    assert bool(found) == bool(checked.returncode), checked.stdout
    return {int(line) - 1: text for line, text in reversed(found)}


def test_every_dashboard_is_what_grafana_calls_one(project: Path) -> None:
    assert len(DASHBOARDS) == 4
    assert complaints(project, [file.read_text() for file in DASHBOARDS]) == {}


def test_mistakes_are_noticed(project: Path) -> None:
    text = (REPOSITORY / "deploy" / "grafana" / "dashboards" / "learning.json").read_text()
    assert all(right in text for right, _ in MISTAKES)
    found = complaints(project, [text.replace(right, wrong, 1) for right, wrong in MISTAKES])
    assert sorted(found) == list(range(len(MISTAKES)))
