"""The status document, by hand."""

from prometheus_client import CollectorRegistry, Gauge, Histogram, Info

from protocol.runtime.health import Health, Notifier
from protocol.runtime.metrics import Readings, Status, read_status


def test_every_number_that_is_known_is_there_under_its_own_name() -> None:
    registry = CollectorRegistry()
    readings = Readings(registry)
    readings.counter("rl_trainer_tokens_total", "", lambda: 3)
    readings.counters("rl_trainer_groups_total", "", "outcome", lambda: {"accepted": 2, "stale": 0.5})
    readings.gauges("rl_trainer_producer_info", "", ("producer", "release"), lambda: {("p", "0.1"): 1})
    readings.gauge("rl_trainer_on", "", lambda: True)
    readings.gauge("other_number", "", lambda: 1)
    Gauge("rl_trainer_loss", "", registry=registry).set(float("nan"))
    Histogram("rl_trainer_step_seconds", "", buckets=(1, 2), registry=registry).observe(1.5)
    Info("rl_trainer", "", registry=registry).info({"run": "r"})
    health = Health(60.0, Notifier(None))
    health.check_ready("producers", lambda: "none is connected")
    health.check_ready("disk", lambda: None)
    status = read_status(registry, health, "rl-trainer", "host-1", 5.0)
    assert status == Status(
        job="rl-trainer", daemon="host-1", at=status.at, started=5.0, info={"run": "r"},
        not_ready={"phase": "starting", "producers": "none is connected"},
        numbers={
            "tokens": 3, "groups": {"accepted": 2, "stale": 0.5}, "producer_info": {"p": {"0.1": 1}}, "on": 1,
            "step_seconds_count": 1, "step_seconds_sum": 1.5,
        },
    )  # fmt: skip
