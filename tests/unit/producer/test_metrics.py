"""A producer's registry against counters and stages chosen by hand."""

from types import SimpleNamespace

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge

from producer.engine_contract import EngineSteps
from producer.metrics import Counters, Delivery, PolicyCounts, ProducerMetrics, Situation, Workload


def test_totals_stages_and_the_engine_are_those_of_the_moment() -> None:
    registry, counters = CollectorRegistry(), Counters()
    metrics = ProducerMetrics(registry)
    work = Workload(waiting_floors=(3, 3), generating=4, scoring=1, busy_s=2.5)
    delivery = Delivery(connected=True, heard_ago_s=0.1, held=9, unacked=2, unacked_bytes=2048, full=False)
    sharing = SimpleNamespace(counts=PolicyCounts(), relayed_bytes=4096)
    steps = EngineSteps(number=10, tokens=2400)
    metrics.watch("p", lambda: Situation(counters, work, delivery, 5, 3, 1, steps), sharing)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("rl_producer_policy_version") == -1
    counters.groups, counters.truncated, counters.swaps, counters.failed_swaps = 7, 2, 5, 1
    counters.idle_s = 0.5
    assert value("rl_producer_groups_generated_total") == 7
    assert value("rl_producer_completion_limit") == 5
    assert value("rl_producer_completions_truncated_total") == 2
    assert value("rl_producer_swaps_total", outcome="live") == 5
    assert value("rl_producer_swaps_total", outcome="refused") == 1
    stages = {
        stage: value("rl_producer_leases", stage=stage) for stage in ("waiting", "generating", "scoring", "unacked")
    }
    assert stages == {"waiting": 2, "generating": 4, "scoring": 1, "unacked": 2}
    sharing.counts.count_download("relay")
    sharing.counts.count_left("slow")
    assert value("rl_producer_policy_downloads_total", source="relay") == 1
    assert value("rl_producer_policy_downloads_total", source="trainer") == 0
    assert value("rl_producer_relays_left_total", reason="slow") == 1
    assert value("rl_producer_relayed_bytes_total") == 4096
    assert value("rl_producer_busy_seconds_total") == 2.5
    assert value("rl_producer_idle_seconds_total") == 0.5
    assert value("rl_producer_reward_workers", state="busy") == 2
    assert (value("rl_producer_connected"), value("rl_producer_paused")) == (1, 0)
    assert (value("rl_producer_engine_steps_total"), value("rl_producer_engine_step_tokens_total")) == (10, 2400)
    assert value("rl_producer_engine_graph_steps_total") is None, "nothing tells it, and it is not 0"
    steps = EngineSteps(10, 2400, 2200, 9)
    assert value("rl_producer_engine_step_sequences_total") == 2200
    assert value("rl_producer_engine_graph_steps_total") == 9

    engine = Gauge("vllm:num_requests_running", "As vLLM has it.")
    try:
        engine.set(3)
        assert value("vllm:num_requests_running") == 3
    finally:
        prometheus_client.REGISTRY.unregister(engine)
