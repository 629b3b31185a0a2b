"""A running endpoint for clients."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from protocol.config.run import RunConfig
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.atropos.atropos import Atropos
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.serving import Serving, listening


@asynccontextmanager
async def served(
    config: RunConfig,
    engine: ServedEngine,
    metrics: CollectorRegistry | None = None,
    keys: tuple[bytes, ...] = (),
    agents: Agents | None = None,
    atropos: Atropos | None = None,
) -> AsyncIterator[tuple[socket.socket, Serving]]:
    with listening(config.serve, []) as listener:
        assert listener is not None
        serving = Serving(config, "test", keys, engine, metrics or CollectorRegistry(), agents, atropos)
        task = asyncio.create_task(serving.run(listener))
        try:
            yield listener, serving
            assert serving.problem is None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
