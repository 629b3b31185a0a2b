"""One daemon of the pair with a stopwatch: `python -m benchmarks.startup_side STAMPS producer.cli|consumer.cli ARGUMENTS`.

Guarantee: the daemon is the product's, started by its own command line; its methods are wrapped to note the first time that
each was called or returned, and nothing else. STAMPS gets one JSON object per stamp; `t` is CLOCK_MONOTONIC.
"""

import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_stamps = sys.argv[1] if __name__ == "__main__" else os.devnull
_seen: set[str] = set()


def stamp(name: str) -> None:
    """Notes the time, once per name."""
    if name not in _seen:
        _seen.add(name)
        line = json.dumps({"name": name, "t": time.monotonic()}) + "\n"
        descriptor = os.open(_stamps, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def watch(
    owner: Any,
    method: str,
    *,
    before: str | None = None,
    after: str | None = None,
    hook: Callable[[], None] | None = None,
) -> None:
    """Stamps calls of `owner.method`, and runs `hook` after the first."""
    original = getattr(owner, method)

    def left() -> None:
        if after:
            stamp(after)
        if hook:
            hook()

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before:
            stamp(before)
        result = original(*args, **options)
        if inspect.isawaitable(result):
            return _awaited(result, left)
        left()
        return result

    setattr(owner, method, wrapped)


async def _awaited(result: Any, left: Callable[[], None]) -> Any:
    value = await result
    left()
    return value


def _watch_producer() -> None:
    from producer import assembly, startup

    stamp("imports")

    def watch_engine() -> None:
        stamp("import of vLLM")
        from producer.engine import core, engine

        watch(core.AsyncLLM, "from_vllm_config", before="engine configuration")
        watch(engine.VllmEngine, "__init__", after="engine start, model load")
        watch(engine.VllmEngine, "warm_up", after="warm-up", hook=lambda: watch_tokens(engine))

    def watch_tokens(engine: Any) -> None:
        record = engine._LoadRecorder.record

        def counted(self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **options: Any) -> None:
            if iteration_stats is not None and iteration_stats.num_generation_tokens:
                stamp("first token")
            record(self, scheduler_stats, iteration_stats, *args, **options)

        engine._LoadRecorder.record = counted

    watch(startup.RewardPool, "start", after="reward workers")
    watch(startup.logs, "adopt_libraries", hook=watch_engine)
    watch(assembly.Link, "_begin_session", before="connected")
    watch(assembly.Generation, "start", before="first lease")
    watch(assembly.AdapterRegistry, "publish", after="first adapter")
    watch(assembly.Mailbox, "put", before="first group")


def _watch_trainer() -> None:
    from consumer.intake import fleet, intake
    from consumer.reporting import step_report as progress
    from consumer.training import run_components, trainer
    from replay import buffer

    stamp("imports")
    watch(run_components.RunComponents, "load", after="dataset and model facts")
    watch(trainer.SlipstreamTrainer, "__init__", after="model and trainer")
    watch(intake.Intake, "start", after="open for producers")
    watch(fleet.Fleet, "join", after="first producer")
    watch(buffer.RolloutBuffer, "offer", after="first group")
    watch(trainer.SlipstreamTrainer, "training_step", before="first batch")
    watch(progress.StepReport, "step", before="first step")


if __name__ == "__main__":
    stamp("interpreter")
    module = importlib.import_module(sys.argv[2])
    {"producer.cli": _watch_producer, "consumer.cli": _watch_trainer}[sys.argv[2]]()
    del sys.argv[1:3]
    sys.exit(module.main())
