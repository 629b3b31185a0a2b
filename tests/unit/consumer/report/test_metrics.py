"""The trainer's registry against a buffer and an intake with numbers chosen by hand; the names of all metrics."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry

from consumer.link.commit_queue import RolloutStorage
from consumer.link.sessions import ProducerSession
from consumer.report.metrics import by_attempt, commit_seconds, watch_evaluation, watch_trainer
from docs.generate_metrics import producer_registry, trainer_registry
from protocol import __version__
from protocol.channel.authenticator import Refusals
from protocol.wire.messages import Heartbeat
from tests.unit.consumer.builders import Growing

UNITS = {"Share": "_ratio", "Time": "_seconds", "When": "_seconds", "Bytes": "_bytes"}
"""What a metric measures by the first word of its text, and the unit that its name then has."""


class World:
    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.buffer: Any = MagicMock(totals=Counter())
        self.buffer.depth = lambda: {"ready": 3, "replayable": 4, "leased": 5, "deferred": 6, "epoch": 7}
        self.intake: Any = MagicMock()
        self.intake.fleet.sessions = {}
        self.intake.store.newest.version, self.intake.clock = 9, lambda: 12.0
        beat = Heartbeat(policy_version=8, capacity=4, held=[], tokens_generated=0, busy_s=0.0, idle_s=7.5)
        refusal = Heartbeat(policy_version=-1, capacity=4, held=[], tokens_generated=0, busy_s=0.0, refused_version=9)
        self.fleet = self.intake.fleet.sessions
        self.fleet[b"a"] = ProducerSession("a", 4, 11.5, {"x", "y"}, "0.2.0", heartbeat=beat)
        self.fleet[b"b"] = ProducerSession("b", 4, 10.5, heartbeat=refusal)
        self.fleet[b"c"] = ProducerSession("c", 4, 12.0)
        self.journal: Any = MagicMock(path=folder / "journal.sqlite")
        self.commit_s = commit_seconds(self.registry)
        disk: Any = MagicMock(used=0.5, max_used=0.9)
        self.refusals = Refusals()
        storage = RolloutStorage(self.buffer, self.journal, disk)
        watch_trainer(self.registry, "run-1", storage, self.intake, self.refusals.counts, lambda: 12.5)

    def value(self, name: str, **labels: Any) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_totals_are_those_of_the_buffer_at_the_scrape(world: World) -> None:
    assert world.value("rl_trainer_groups_trained_total") == 0
    world.buffer.totals.update(trained=32, accepted=40, no_signal=7, failed_expired=2, attempt_2_scored=8)
    assert world.value("rl_trainer_groups_trained_total") == 32
    assert world.value("rl_trainer_groups_received_total", outcome="no_signal") == 7
    assert world.value("rl_trainer_leases_failed_total", reason="expired") == 2
    assert world.value("rl_trainer_completions_scored_total", attempt="2") == 8


def test_totals_of_sources_are_there_where_there_are_several(world: World) -> None:
    name = "rl_trainer_source_groups_total"
    assert world.value(name, source="easy", outcome="trained") is None
    world.buffer.sources.names = ["easy", "hard"]
    world.buffer.totals.update({"sources/easy/trained": 3, "sources/other/trained": 5})
    assert [world.value(name, source=source, outcome="trained") for source in ("easy", "hard")] == [3, 0]
    assert world.value(name, source="other", outcome="trained") is None


def test_label_values_known_in_advance_are_there_at_zero(world: World) -> None:
    for outcome in ("accepted", "no_signal", "stale", "duplicate", "unknown_lease", "invalid"):
        assert world.value("rl_trainer_groups_received_total", outcome=outcome) == 0
    assert world.value("rl_trainer_leases_failed_total", reason="reward_failed") == 0
    assert world.value("rl_trainer_completions_scored_total", attempt="1") == 0


def test_refusals_at_the_door_are_counted_by_reason(world: World) -> None:
    assert world.value("rl_trainer_connections_refused_total", reason="unknown_key") == 0
    world.refusals("unknown_key", "a connection from a test")
    assert world.value("rl_trainer_connections_refused_total", reason="unknown_key") == 1


def test_queues_waits_and_the_run(world: World) -> None:
    assert world.value("rl_trainer_groups_ready") == 3
    assert world.value("rl_trainer_rerolls_waiting") == 6
    assert world.value("rl_trainer_waiting_seconds") == 12.5
    assert world.value("rl_trainer_disk_used_limit_ratio") == 0.9
    assert world.value("rl_trainer_info", run="run-1", release=__version__) == 1


def test_of_a_large_fleet_those_that_are_connected_longest_are_named(world: World) -> None:
    world.fleet.clear()
    for number in range(200):
        world.fleet[f"{number}".encode()] = ProducerSession(f"p{number}", 1, 0.0)
    assert world.value("rl_trainer_producers_connected") == 200
    assert [world.value("rl_trainer_producer_leases", producer=f"p{number}") for number in (0, 127, 128)] == [
        0,
        0,
        None,
    ]
    world.fleet.pop(b"0")
    assert world.value("rl_trainer_producer_leases", producer="p128") == 0


def test_producers_are_there_while_they_are_connected(world: World) -> None:
    assert world.value("rl_trainer_producer_lag_versions", producer="a") == 1
    assert world.value("rl_trainer_producer_policy_version", producer="b") == -1
    assert world.value("rl_trainer_producer_info", producer="a", release="0.2.0") == 1
    assert world.value("rl_trainer_producer_info", producer="b", release="") == 1
    assert world.value("rl_trainer_producer_idle_seconds_total", producer="a") == 7.5
    assert [world.value("rl_trainer_producer_refused_version", producer=name) for name in "ab"] == [-1, 9]
    assert world.value("rl_trainer_producer_leases", producer="a") == 2
    assert world.value("rl_trainer_producer_heard_seconds", producer="b") == 1.5
    assert world.value("rl_trainer_producer_policy_version", producer="c") == -1, "no heartbeat yet"
    del world.fleet[b"b"]
    assert world.value("rl_trainer_producer_leases", producer="b") is None


def test_the_journal_counts_with_its_log(world: World) -> None:
    assert world.value("rl_trainer_journal_bytes") == 0
    world.journal.path.write_bytes(b"x" * 10)
    world.journal.path.with_name("journal.sqlite-wal").write_bytes(b"x" * 5)
    assert world.value("rl_trainer_journal_bytes") == 15


def test_attempts_are_read_out_of_the_counts() -> None:
    counts = {"attempt_1_scored": 5, "attempt_12_scored": 3, "attempt_1_successes": 2, "accepted": 9}
    assert by_attempt(counts, "scored") == {"1": 5, "12": 3}
    assert by_attempt({}, "scored") == {"1": 0}


def test_evaluations_that_end_during_a_scrape_do_not_fail_it() -> None:
    registry = CollectorRegistry()
    evaluation: Any = MagicMock()
    evaluation.totals, evaluation.due.num_skipped = Growing(scored=2, incomplete=1), 3
    watch_evaluation(registry, evaluation)
    found = {
        outcome: registry.get_sample_value("rl_trainer_evaluations_total", {"outcome": outcome})
        for outcome in ("scored", "incomplete", "skipped")
    }
    assert found == {"scored": 2, "incomplete": 1, "skipped": 3}


@pytest.mark.parametrize("registry", [trainer_registry(), producer_registry()], ids=["trainer", "producer"])
def test_every_name_says_its_daemon_and_its_unit_and_every_metric_what_it_means(registry: CollectorRegistry) -> None:
    for family in registry.collect():
        if family.name.startswith(("process_", "python_")):
            continue
        assert family.name.startswith(("rl_trainer", "rl_producer"))
        assert family.documentation.endswith(".")
        unit = UNITS.get(family.documentation.split()[0], "")
        assert unit in family.name, f"{family.name}: its text is about {unit}"
