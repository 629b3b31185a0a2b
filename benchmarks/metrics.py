"""What metrics cost: `python -m benchmarks.metrics`, or `make bench-metrics`.

Guarantee: the step that the cost is held against is one of a real run (`make demo` leaves one), and so are the numbers that are
fed to the metrics; vLLM's own statistics are measured on two real engines, with and without them, which take turns burst by
burst, so that whatever else the machine does falls on both.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from consumer.reporting.learning_metrics import LearningMetrics
from consumer.reporting.metrics import commit_seconds
from producer.interfaces import Adapter
from producer.metrics import ProducerMetrics
from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.files import rotated_lines
from protocol.service.health import Health
from protocol.service.metrics import Reexport, add_process_metrics
from protocol.service.systemd import Notifier
from protocol.wire.messages import Sampling

CONFIG = "examples/arithmetic/run.yaml"
SCRAPE_EVERY_S = 15.0
BURST_GROUPS = 32
MICRO_BATCHES_PER_STEP = 4
COMMITS_PER_STEP = 20  # of the journal; the demo makes 15 to 20


def per_call_s(call: Callable[[], object], calls: int = 200, rounds: int = 15) -> float:
    """Median over the rounds of the mean time of a call."""

    def one_round() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) / calls

    one_round()
    gc.collect()
    return statistics.median(one_round() for _ in range(rounds))


def trainer_cost_s(config: RunConfig, steps: list[dict[str, Any]]) -> float:
    """Of everything that is told to the trainer's metrics and health in one step."""
    registry = CollectorRegistry()
    learning = LearningMetrics(registry, config.reward_names, max_steps=60, max_staleness=2)
    commits, health = commit_seconds(registry), Health(60.0, Notifier(None))
    numbers = {key: value for key, value in steps[-1].items() if isinstance(value, float)}

    def step() -> None:
        learning.batch([1] * config.pipeline.groups_per_step)
        learning.step(1, 1.0, numbers, wait_s=0.1, step_s=0.1, tokens=100)
        learning.logged({"loss": 0.1, "grad_norm": 1.0, "learning_rate": 1e-3})
        for _ in range(COMMITS_PER_STEP):
            commits.observe(0.001)
        for _ in range(MICRO_BATCHES_PER_STEP + 2):
            health.beat("training")

    return per_call_s(step)


def producer_cost_s(config: RunConfig) -> float:
    """Of everything that is told to a producer's metrics for the groups of one step."""
    metrics = ProducerMetrics(CollectorRegistry())

    def group() -> None:
        metrics.generation_s.observe(0.5)
        for _ in range(config.sampling.num_generations):
            metrics.lengths.observe(4)
        metrics.reward_s.observe(0.003)

    return per_call_s(group) * config.pipeline.groups_per_step


class Engines:
    """Two engines with the run's adapter loaded, one of them with vLLM's statistics."""

    def __init__(self, config: RunConfig, adapter: Path) -> None:
        from producer.engine.engine import VllmEngine

        self._loop = asyncio.new_event_loop()
        self._sampling = Sampling(config.sampling.num_generations, config.sampling.max_completion_length, 1.0)
        self._adapter = Adapter(1, "v1", 1, adapter)
        self._engines: dict[bool, Any] = {}
        for counted in (True, False):
            engine_section = config.engine | {"disable_log_stats": not counted}
            self._engines[counted] = self._loop.run_until_complete(
                self._start(VllmEngine, config.model_copy(update={"engine": engine_section}))
            )

    async def _start(self, factory: Any, config: RunConfig) -> Any:
        engine = factory(config, 0)
        await engine.warm_up()
        await engine.weights.load(self._adapter)
        return engine

    def burst_s(self, *, counted: bool, num_groups: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of this process, for so many groups that are asked for at once."""
        engine = self._engines[counted]

        async def burst() -> None:
            prompts = ([i % 10, (i + 3) % 10, 10, i % 7, i % 9] for i in range(num_groups))
            await asyncio.gather(*(engine.generate(prompt, self._sampling, self._adapter) for prompt in prompts))

        started, cpu_started = time.perf_counter(), time.process_time()
        self._loop.run_until_complete(burst())
        return time.perf_counter() - started, time.process_time() - cpu_started

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()


def engine_cost(engines: Engines, bursts: int, completions_per_group: int) -> dict[str, Any]:
    """What vLLM's statistics add to a burst, in time and in CPU of the process that keeps them; engines take turns, and who goes
    first changes every time."""
    for counted in (True, False):
        engines.burst_s(counted=counted, num_groups=BURST_GROUPS)
    walls, cpus = [], []
    for index in range(bursts):
        first = bool(index % 2)
        spent = {counted: engines.burst_s(counted=counted, num_groups=BURST_GROUPS) for counted in (first, not first)}
        walls.append(spent[True][0] / spent[False][0])
        cpus.append(spent[True][1] - spent[False][1])
    return {
        "engine_statistics_time_ratio": statistics.median(walls),
        "engine_statistics_time_ratio_quartiles": statistics.quantiles(walls, n=4),
        "engine_statistics_us_per_completion": statistics.median(cpus) / BURST_GROUPS / completions_per_group * 1e6,
    }


def scrape_cost_s() -> float:
    """CPU of one scrape of a producer with vLLM's metrics, which is the larger of the two daemons."""
    registry = CollectorRegistry()
    add_process_metrics(registry, "rl_producer", [])
    ProducerMetrics(registry)
    Reexport(registry, prometheus_client.REGISTRY, "vllm:")
    return per_call_s(lambda: generate_latest(registry), calls=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="a finished run of the demo")
    parser.add_argument("--bursts", type=int, default=60, help=f"of {BURST_GROUPS} groups for each engine")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/metrics.json"))
    arguments = parser.parse_args()
    steps = rotated_lines.read(arguments.run / "steps.jsonl")
    config = load_config(CONFIG, [])
    step_s = statistics.median(step["step_s"] for step in steps[1:])
    engines = Engines(config, arguments.run / "adapter")
    try:
        engine = engine_cost(engines, arguments.bursts, config.sampling.num_generations)
        scrape_s = scrape_cost_s()
    finally:
        engines.close()
    trainer_s, producer_s = trainer_cost_s(config, steps), producer_cost_s(config)
    result = {
        "step_s": step_s,
        "trainer_us_per_step": trainer_s * 1e6,
        "trainer_share_of_step": trainer_s / step_s,
        "producer_us_per_step": producer_s * 1e6,
        "producer_share_of_step": producer_s / step_s,
        "scrape_ms": scrape_s * 1e3,
        "scrape_share_of_a_core": scrape_s / SCRAPE_EVERY_S,
    } | engine
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for name, value in result.items():
        shown = " ".join(f"{one:.4f}" for one in value) if isinstance(value, list) else f"{value:.6f}"
        print(f"{name:34} {shown}")


if __name__ == "__main__":
    main()
