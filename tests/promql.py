"""Every PromQL expression of the dashboards and of the rules, for tests."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
SELECTOR = re.compile(
    r"(?<![\w:])((?:run:|producer:|vllm:|rl_trainer_|rl_producer_|process_)[\w:]+|up)\b(?!\")(\{[^}]*\})?"
)


class Expression(NamedTuple):
    """A PromQL expression and where it stands."""

    where: str
    promql: str


def of_dashboards(run: str) -> Iterator[Expression]:
    """With Grafana's variables filled in."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                promql = target["expr"].replace("$run", run).replace("$producer", ".*")
                promql = promql.replace("$__rate_interval", "30s")
                yield Expression(f"{file.stem}, {panel['title']} {target['refId']}", promql)


def of_rules(kind: str) -> Iterator[Expression]:
    """Of the rules of a kind, `record` or `alert`."""
    for text in rule_files().values():
        for group in yaml.safe_load(text)["groups"]:
            yield from (Expression(rule[kind], rule["expr"]) for rule in group["rules"] if kind in rule)


def selectors(promql: str) -> set[str]:
    """The metrics of an expression with their matchers."""
    return {f"{name}{matchers}" for name, matchers in SELECTOR.findall(promql)}


def rule_files() -> dict[str, str]:
    """The rule files. What needs a past of 15 minutes is content with seconds: no test takes that long."""
    files = sorted(PROMETHEUS.glob("*.rules.yml"))
    return {file.name: file.read_text().replace("offset 15m", "offset 5s") for file in files}
