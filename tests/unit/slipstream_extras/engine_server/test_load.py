"""What servers say of their load lowers the number of groups in them, as an engine in the process does."""

from pathlib import Path

import pytest

from producer.engine_contract import EngineLoad, EngineSteps
from producer.rollouts.admission import Admission
from slipstream_extras.engine_server.api import scheduler_load
from slipstream_extras.engine_server.server import OwnLoad, joined
from tests.unit.producer.loop import asynchronous, until
from tests.unit.slipstream_extras.engine_server.running import running, servers

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""
STEPS = """
vllm:iteration_tokens_total_bucket{engine="0",le="256.0",model_name="m"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 10.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 2400.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 30.0
vllm:iteration_tokens_total_sum{engine="1",model_name="m"} 5600.0
"""


def test_the_engines_of_a_server_are_taken_together() -> None:
    assert scheduler_load(METRICS) == EngineLoad(0.75, 15, 5, 7)
    assert scheduler_load(METRICS + STEPS) == EngineLoad(0.75, 15, 5, 7, EngineSteps(40, 8000))
    assert scheduler_load(METRICS + STEPS.replace("2400.0", "NaN")) == EngineLoad(0.75, 15, 5, 7)


def test_the_steps_of_several_servers_are_added_up_if_all_tell_them() -> None:
    some, none = EngineLoad(0.5, 1, 0, 0, EngineSteps(40, 8000)), EngineLoad(0.5, 1, 0, 0)
    assert joined([some, some, None]) == EngineLoad(0.5, 2, 0, 0, EngineSteps(80, 16_000))
    assert joined([some, none]) == EngineLoad(0.5, 2, 0, 0)


@pytest.mark.parametrize(
    "metrics",
    ["", "other 1.0", METRICS.replace("cache_usage", "cash"), METRICS.replace("12.0", "x")]
    + [METRICS.replace("12.0", lie) for lie in ("NaN", "+Inf", "1e400", "-1.0")]
    + [METRICS.replace("0.5", "NaN"), METRICS.replace('model_name="m"', ' ="m"')],
)
def test_metrics_that_do_not_say_it_say_nothing(metrics: str) -> None:
    assert scheduler_load(metrics) is None


def test_of_preemptions_a_producer_has_the_share_of_its_requests() -> None:
    own, now = OwnLoad(), EngineLoad(0.5, 30, 10, 100)
    own.note(now, 10)
    assert own.load == EngineLoad(0.5, 30, 10, 0), "those before were of others"
    own.note(EngineLoad(0.5, 30, 10, 180), 10)  # a quarter of the requests
    own.note(EngineLoad(0.5, 0, 0, 190), 10)  # they have just ended
    own.note(EngineLoad(0.5, 40, 0, 7), 10)  # it was started again
    own.note(EngineLoad(0.5, 40, 0, 15), 0)
    own.note(None, 10)
    assert own.load == EngineLoad(0.5, 40, 0, 30)  # 80 / 4 + 10
    assert joined([own.load, None, EngineLoad(0.25, 1, 2, 3)]) == EngineLoad(0.5, 41, 2, 33)
    assert joined([None]) is None


def test_since_a_report_what_was_asked_waits_and_what_has_ended_is_gone() -> None:
    own = OwnLoad()
    assert own.now(8, 8) is None
    own.note(EngineLoad(0.5, 30, 10, 0), 20)  # half of what it has
    assert own.now(20, 0) == EngineLoad(0.5, 30, 10, 0)
    assert own.now(20, 8) == EngineLoad(0.5, 30, 18, 0)
    assert own.now(0, 8) == EngineLoad(0.25, 15, 13, 0), "others have the rest"
    own.note(EngineLoad(0.5, 30, 10, 0), 64)  # all of it, and 24 have ended
    assert own.now(32, 0) == EngineLoad(0.25, 15, 5, 0)
    assert own.now(0, 0) == EngineLoad(0.0, 0, 0, 0)
    own.note(EngineLoad(0.0, 0, 0, 0), 0)
    assert own.now(0, 8) == EngineLoad(0.0, 0, 8, 0)


@asynchronous
async def test_a_server_that_preempts_takes_fewer_groups(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,), load = started, started[0].load
        assert engine.current_load() is None
        load |= {
            "kv_cache_usage_perc": 0.99,
            "num_requests_running": 8,
            "num_requests_waiting": 0,
            "num_preemptions_total": 50,
        }
        await until(lambda: engine.current_load() is not None)
        admission = Admission(4, 2, engine.current_load)
        places = [admission.place() for _ in range(4)]
        for place in places:
            await place.__aenter__()
        async with engine.servers.all[0].working(8):
            load["num_preemptions_total"] = 90
            await until(lambda: (told := engine.current_load()) is not None and told.preemptions == 40)
        await places[0].__aexit__(None, None, None)
        assert admission.limit == 6
        assert server.asked["/metrics"] > 1
