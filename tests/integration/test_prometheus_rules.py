"""Prometheus' own tool judges configuration, rules and alerts; alerts, their tests and the runbook agree."""

import json
import re
import subprocess
from collections import defaultdict

import pytest
import yaml

from tests.promql import DEPLOY, PROMETHEUS, of_rules
from tests.tools import require

pytestmark = pytest.mark.integration

DOCS = DEPLOY.parent / "docs"
ALERTS = {alert.where for alert in of_rules("alert")}
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))


def promtool(*arguments: str) -> str:
    require("promtool", "prometheus")
    checked = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, cwd=PROMETHEUS)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return checked.stdout


def test_configuration_and_rules_are_valid() -> None:
    assert promtool("check", "config", "prometheus.yml").count("SUCCESS") == 4
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.rules.yml").count("SUCCESS") == 1


def test_every_alert_is_raised_when_it_should_be_and_only_then() -> None:
    assert promtool("test", "rules", *map(str, RULE_TESTS)).count("SUCCESS") == len(RULE_TESTS) == 4


def test_rule_tests_evaluate_what_is_recorded_before_the_alerts_that_use_it() -> None:
    """promtool would take the groups in any order."""
    names = [
        group["name"]
        for file in ("recording.rules.yml", "alerts.rules.yml")
        for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"]
    ]
    for file in RULE_TESTS:
        assert yaml.safe_load(file.read_text())["group_eval_order"] == names


def test_every_alert_has_a_test_that_fires_one_that_does_not_and_is_silent_for_runs_without_a_fault() -> None:
    fires: defaultdict[str, int] = defaultdict(int)
    silent: defaultdict[str, int] = defaultdict(int)
    runs_without_a_fault = defaultdict(set)
    for file in RULE_TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            for check in case["alert_rule_test"]:
                if file.name == "quiet.test.yml":
                    runs_without_a_fault[case["name"]].add(check["alertname"])
                (fires if check["exp_alerts"] else silent)[check["alertname"]] += 1
    assert set(fires) == set(silent) == ALERTS
    assert list(runs_without_a_fault.values()) == [ALERTS] * 3


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    headings = re.findall(r"^## (.*)$", (DOCS / "alerts.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
    groups = yaml.safe_load((PROMETHEUS / "alerts.rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_section_of_the_runbook_has_the_same_form() -> None:
    """The severity of the rule with its meaning, where to look, what to do."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.rules.yml").read_text())["groups"]
    severities = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    sections = re.split(r"^## (.*)$", (DOCS / "alerts.md").read_text(), flags=re.MULTILINE)[1:]
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        leads = dict.fromkeys(re.findall(r"^- \*\*(\w+)\*\*", text, re.MULTILINE))
        assert list(leads) == [severities[name].capitalize(), "Look", "Do"], name


def test_every_panel_that_the_runbook_names_exists() -> None:
    boards = [json.loads(file.read_text()) for file in (DEPLOY / "grafana" / "dashboards").glob("*.json")]
    titles = {one["title"].removeprefix("Slipstream / ") for board in boards for one in (board, *board["panels"])}
    text = re.sub(r"`[^`]*`", "", (DOCS / "alerts.md").read_text())
    named = set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text))
    assert len(named - {"italics"}) > 10
    assert named - {"italics"} <= titles
