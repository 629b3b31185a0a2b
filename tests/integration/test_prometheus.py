"""A real Prometheus scrapes the real pair, and every expression of dashboards and rules is put to it."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.promql import Expression, of_dashboards, of_rules, selectors
from tests.tools import require

from .pair import Daemon
from .prometheus import Prometheus, pending
from .runs import eventually
from .test_pair import write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

DATA_WITHIN_S = 120.0
REWARD = """
import random

def some(completion_ids, **_):
    return [{"tokens": [(len(ids), random.choice([0.0, 0.5, 1.0]))]} for ids in completion_ids]
"""
"""There is something to learn from in every group, however long the run is, and each completion is a span with a reward."""

SOURCES = ("sums", "others")

NO_NUMBER_HERE = {
    *("rl_trainer_gpu_memory", "rl_producer_gpu_memory", "rl_producer_engine_graph_steps"),
    "rl_trainer_teacher_divergence",
}
"""The daemons of this test run without a GPU, so without CUDA graphs, and a policy that teaches itself gives no divergence."""


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    """A run that trains, with everything turned on that has a metric."""
    require("prometheus", "prometheus")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sl-", dir="/tmp")))
        config = write_run(
            folder,
            "qwen2",
            [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)],
            REWARD,
            dataset={
                "path": None,
                "sources": [
                    {"name": name, "path": f"{folder}/data.jsonl", "answer_column": "answer"} for name in SOURCES
                ],
            },
            loss={"ce_coef": 0.01},
            rewards={"credit": "per_step"},
            teachers=[{"name": "self", "prompt": "Now: {prompt}"}],
            distillation={"mode": "advantage"},
            replay={"mode": "signal", "min_size": 2},
            reroll={"delay_versions": 1},
            correction={"preset": "token_mask"},
            trainer={"max_steps": 1_000_000, "beta": 0.01},
            evaluation={
                "dataset": {"sources": [{"name": name, "path": f"{folder}/data.jsonl"} for name in SOURCES]},
                "every_versions": 5,
            },
        )
        for module, name in (("producer.app.cli", "producer"), ("consumer.app.cli", "trainer")):
            daemon = Daemon(module, folder / f"{name}.log", "--config", str(config))
            stack.callback(daemon.close)
        daemon.wait_for(r"step 2/")
        yield folder / "run"


@pytest.fixture(scope="module")
def prometheus(run_dir: Path) -> Iterator[Prometheus]:
    with closing(Prometheus(run_dir.parent / "prometheus", run_dir)) as server:
        server.wait()
        yield server


def run_of(prometheus: Prometheus) -> str:
    """The id of the run, which every metric of both daemons has."""

    found = set[str]()

    def is_found() -> bool:
        up = prometheus.get("query", query='{__name__=~"rl_(trainer|producer)_info"}')["result"]
        found.clear()
        found.update(series["metric"].get("run", "") for series in up if len(up) == 2)
        return len(found) == 1

    eventually(is_found, 60)
    return found.pop()


def test_every_expression_of_dashboards_and_rules_has_numbers_while_a_run_trains(
    prometheus: Prometheus, run_dir: Path
) -> None:
    expressions = [*of_dashboards(run_of(prometheus)), *of_rules("record")]
    assert len(expressions) > 100
    hopeless = [one for one in expressions if any(name in one.promql for name in NO_NUMBER_HERE)]
    assert pending(prometheus, [one for one in expressions if one not in hopeless], DATA_WITHIN_S) == []
    assert len(hopeless) == 6
    assert pending(prometheus, hopeless, 0.1) == hopeless, "shorten NO_NUMBER_HERE"


def test_every_alert_looks_at_series_that_exist(prometheus: Prometheus) -> None:
    """A daemon is down for a moment where a busy machine does not answer a scrape within its second."""
    alerts = list(of_rules("alert"))

    def true(*names: str) -> list[str]:
        return [alert.where for alert in alerts if alert.where in names and prometheus.value(alert.promql)]

    wrong = ("NoProgress", "SwapRefused", "LossNotFinite", "DaemonDown", "Unhealthy", "AuthFailures")
    eventually(lambda: true("CompletionsTruncated"), pause_s=0.5)  # the model of this run hardly ever ends a completion
    eventually(lambda: not true(*wrong), pause_s=0.5)
    seen = [Expression(alert.where, selector) for alert in alerts for selector in sorted(selectors(alert.promql))]
    assert {alert.where for alert in seen} == {alert.where for alert in alerts}
    assert pending(prometheus, seen, DATA_WITHIN_S) == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert len(rules) == len(alerts) + len(list(of_rules("record")))


def test_both_daemons_are_healthy_and_ready(prometheus: Prometheus, run_dir: Path) -> None:
    def targets() -> list[dict[str, Any]]:
        return prometheus.get("targets")["activeTargets"]

    up = {("rl-trainer", str(run_dir), "up"), ("rl-producer", str(run_dir), "up")}
    eventually(
        lambda: {(each["labels"]["job"], each["labels"]["run_dir"], each["health"]) for each in targets()} == up,
        pause_s=0.5,
    )
    for target in targets():
        for path in ("healthz", "readyz"):
            with urllib.request.urlopen(f"http://{target['labels']['instance']}/{path}", timeout=10) as answer:
                assert (answer.status, json.load(answer)["status"]) == (200, "ok")
