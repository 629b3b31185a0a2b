"""The dashboards as files: current, complete, and addressable for good."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import generate
from tests.promql import DASHBOARDS, DEPLOY

BOARDS = {file.stem: json.loads(file.read_text()) for file in DASHBOARDS.glob("*.json")}

every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["generate", *arguments])
    generate.main()


def test_the_files_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--check")


def test_a_file_that_is_out_of_date_or_one_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "FOLDER", tmp_path / "dashboards")
    with pytest.raises(SystemExit, match="out of date"):
        run(monkeypatch, "--check")
    run(monkeypatch)
    run(monkeypatch, "--check")
    (tmp_path / "dashboards" / "old.json").write_text("{}")
    with pytest.raises(SystemExit, match="out of date"):
        run(monkeypatch, "--check")


def test_identifiers_are_unique_and_stay() -> None:
    assert {name: board["uid"] for name, board in BOARDS.items()} == {
        name: f"slipstream-{name}" for name in ("learning", "pipeline", "producer-engine", "fleet")
    }
    for board in BOARDS.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
    [reward] = [panel for panel in BOARDS["learning"]["panels"] if panel["title"] == "Reward"]
    assert reward["id"] == 616479666, "links to panels would break"


@every_board
def test_every_panel_says_what_it_shows_and_what_to_do(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        assert panel["description"].endswith(".")
        assert ";" in panel["description"], "what it means; what to do when it looks wrong"
        assert panel["fieldConfig"]["defaults"]["unit"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends)
        assert len(set(legends)) == len(legends)
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"]


@every_board
def test_panels_do_not_overlap_and_ask_for_the_chosen_run(board: dict[str, Any]) -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert target["expr"].count("{") == target["expr"].count('run="$run"') > 0
            assert target["datasource"]["uid"] == "${datasource}"


def test_grafana_is_told_where_dashboards_and_prometheus_are() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "slipstream.yml").read_text())["providers"]
    assert f"install -d {provider['options']['path']}\n" in (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    [source] = yaml.safe_load((provisioning / "datasources" / "slipstream.yml").read_text())["datasources"]
    scrape_interval = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["global"][
        "scrape_interval"
    ]
    assert (source["type"], source["jsonData"]["timeInterval"]) == ("prometheus", scrape_interval)


def test_installing_the_monitoring_keeps_the_configuration_that_is_there(tmp_path: Path) -> None:
    """By the commands of docs/monitoring.md, in a root of their own."""
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    commands = re.findall(r"^install -m 644 .*/etc/prometheus/$", page, re.M)
    (tmp_path / "prometheus.yml").write_text("# of somebody else")
    for command in commands:
        line = command.replace("/etc/prometheus/", f"{tmp_path}/")
        subprocess.run(["bash", "-c", line], cwd=DEPLOY.parent, check=True, timeout=30)
    assert {file.name for file in tmp_path.glob("*.yml")} == {
        "prometheus.yml",
        "recording.rules.yml",
        "alerts.rules.yml",
    }
    assert (tmp_path / "prometheus.yml.~1~").read_text() == "# of somebody else"
