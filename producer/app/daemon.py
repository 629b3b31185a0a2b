"""The life of an `rl-producer` process.

Guarantee: it starts in the order in which mistakes are cheapest (reward functions, then vLLM's configuration, then weights, then
the wire) and ends in the reverse one. The first SIGTERM or Ctrl-C hands unfinished leases back and exits with 0, the second
exits at once, as does one while it starts (`producer.app.cli`); an exception in any task or thread ends the process.
"""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from typing import Any

from producer.app.timeline import log, timeline_path
from producer.app.wiring import (
    Launch,
    Producer,
    build_base,
    build_helpers,
    build_producer,
    open_tokenizer,
    start_engine,
)
from protocol.config.run import RunConfig
from protocol.errors import EngineError, ExitCode
from protocol.exposition import Watch, watched
from protocol.runtime import logs
from protocol.runtime.processes import tie_children
from protocol.runtime.signals import call_on_signals, end_on_signals
from protocol.wire.model_source import fetch_model

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0  # for delivering finished groups when asked to stop
_UNWIND_S = 5.0  # for tasks to end when cancelled
_SIGNAL_GRACE_S = 1.0


def run(config: RunConfig, gpus: list[int], bundle: str = "") -> ExitCode:
    """Run until the trainer has finished or a signal comes. Raises SlipstreamError for whatever a user can act on.

    Args:
        bundle: the digest of the one that `config` is from, if the trainer gave it.
    """
    tie_children()
    launch = Launch.of(config, gpus, bundle)
    with watched(config, "rl-producer", gpus, launch.name) as watch, asyncio.Runner(loop_factory=_loop) as runner:
        logs.keep(log(timeline_path(config.run_dir, launch.name)))
        fetch_model(config.model, watch.health)
        runner.run(live(launch, watch))
    return ExitCode.OK


def _loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop if it is installed. vLLM brings it, and its own server uses it for a thousand requests at once."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def live(launch: Launch, watch: Watch) -> None:
    async with AsyncExitStack() as stack:
        base = build_base(launch, watch, stack)
        helpers = build_helpers(base, stack)
        with watch.health.starting("loading reward functions and engine", launch.config.pipeline.stall_timeout_s):
            await helpers.start()
            engine = await start_engine(base, stack)
            tokenizer = await open_tokenizer(base, helpers, engine)
        parts = build_producer(base, helpers, engine, tokenizer)
        try:
            await _main_loop(parts)
        finally:
            await _shutdown(parts)


async def _main_loop(parts: Producer) -> None:
    """Run until a signal comes or the trainer has finished. Raises what fails."""
    tasks, helpers, stop = parts.base.tasks, parts.helpers, _stop_on_signals()
    for work in (
        parts.take_events(),
        parts.registry.run(),
        parts.registry.unload_released(),
        parts.supervision.run(),
    ):
        tasks.spawn(work)
    if parts.serve is not None:
        tasks.spawn(parts.serve())
    for program in helpers.programs.values():
        tasks.spawn(program.run())
    if parts.gpu_turns is not None:
        tasks.spawn(parts.gpu_turns.run())
    parts.link.start()
    parts.base.watch.health.started(f"engine ready, trainer at {parts.base.config.control_endpoint}")
    asked = asyncio.create_task(stop.wait())
    waited: list[asyncio.Future[Any]] = [asked, tasks.outcome]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if tasks.outcome.done() and isinstance(tasks.outcome.exception(), EngineError):
            # The engine core may have got the same signal, and be faster.
            await asyncio.wait({asked}, timeout=_SIGNAL_GRACE_S)
        if not asked.done():
            tasks.outcome.result()
            parts.supervision.engine.note_end()
    finally:
        asked.cancel()


async def _shutdown(parts: Producer) -> None:
    """Begin nothing more, deliver the groups that are finished, and return the leases that are not."""
    parts.base.watch.health.stopping("handing leases back")
    parts.generation.hand_back_all()
    programs = parts.helpers.programs.values()
    await asyncio.gather(*(program.close() for program in programs))  # before the endpoint, which they use
    await parts.base.tasks.cancel(_UNWIND_S)  # an engine that hangs must not keep the process
    parts.link.stop(_FLUSH_S)
    await asyncio.to_thread(parts.link.join, _FLUSH_S + 5)
    parts.base.timeline.record("stop", **parts.supervision.totals())


def _stop_on_signals() -> asyncio.Event:
    """Is set by the first signal. The second one ends the process, even while the engine's shutdown blocks the loop. Children
    end too (`protocol.runtime.processes`)."""
    stop = asyncio.Event()

    def ask(number: signal.Signals) -> None:
        end_on_signals(ExitCode.INTERRUPTED)
        logger.info("%s: handing leases back and stopping (once more to stop at once)", number.name)
        stop.set()

    call_on_signals(asyncio.get_running_loop(), ask)
    return stop
