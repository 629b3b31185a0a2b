"""What people and services read of the repository: workflows, templates, the citation, the package's description."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from protocol import __version__

REPOSITORY = Path(__file__).parents[2]
GITHUB = REPOSITORY / ".github"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
FORMS = [file for file in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if file.name != "config.yml"]
MOST_LINES = 60  # of the changelog


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", sorted(GITHUB.glob("workflows/*.yml"))),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", [REPOSITORY / "CITATION.cff"]),
    ],
)
def test_a_file_for_a_service_has_the_services_form(schema: str, files: list[Path], tmp_path: Path) -> None:
    from check_jsonschema import main as check_jsonschema

    def judged(*files: Path) -> Result:
        return CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])

    found = judged(*files)
    assert (found.exit_code, files != []) == (0, True), found.output
    (tmp_path / "bad.yml").write_text("unknown: 1\n")
    assert judged(tmp_path / "bad.yml").exit_code == 1


def test_what_a_workflow_runs_exists_and_may_only_read() -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for file in GITHUB.glob("workflows/*.yml"):
        text = file.read_text()
        assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_one_version_and_one_range_of_pythons_are_said_everywhere() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == __version__
    assert f"\n## {__version__} " in (REPOSITORY / "CHANGELOG.md").read_text()
    project = PROJECT["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    pythons = {each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each}
    tests = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())["jobs"]["unit"]
    assert pythons == set(tests["strategy"]["matrix"]["python-version"]) == {"3.11", "3.12", "3.13"}
    for page in ("README.md", "CONTRIBUTING.md"):
        assert re.search(r"Python\s+3\.11\s+to\s+3\.13", (REPOSITORY / page).read_text()), page


def test_the_changelog_is_short() -> None:
    assert (REPOSITORY / "CHANGELOG.md").read_text().count("\n") <= MOST_LINES
