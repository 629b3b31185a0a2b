"""The dashboards: each metric exists, each panel is complete and at its place, and Grafana finds them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promql import DASHBOARDS, DEPLOY, of_dashboards, of_rules, selectors

BOARDS = {file.stem: json.loads(file.read_text()) for file in DASHBOARDS.glob("*.json")}

every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_every_metric_of_a_panel_or_rule_is_declared_and_every_recorded_one_is_used() -> None:
    asked = {
        selector.partition("{")[0]
        for one in (*of_dashboards("/run"), *of_rules("record"), *of_rules("alert"))
        for selector in selectors(one.promql)
    }
    assert "rl_trainer_reward" in asked
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in asked if name.startswith("rl_")}
    assert ours <= set(re.findall(r"^\| `(\w+)`", (DEPLOY.parent / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert {name for name in asked if name.startswith(("run:", "producer:"))} == {
        one.where for one in of_rules("record")
    }


def test_identifiers_are_unique() -> None:
    for name, board in BOARDS.items():
        assert board["uid"] == f"slipstream-{name}", "links to it would break"
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)


@every_board
def test_every_panel_has_a_meaning_a_unit_and_a_legend(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])


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
