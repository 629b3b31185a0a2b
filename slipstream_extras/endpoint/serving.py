"""The life of the OpenAI-compatible endpoint in a producer.

Guarantee: the endpoint listens before the engine is loaded, so that a port in use is reported at once. While it listens, a file
in `RUN_DIR/serve/` has its address. When it ends, the daemon goes on without it and `/readyz` shows the reason. No key is ever
logged.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from protocol.channel.keys import read_private, secret_line
from protocol.config.operation import ServeSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.exposition import announced
from protocol.runtime.http_server import ConnectionLimiter, Server, listen
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.generation import ClientGeneration, ServedEngine
from slipstream_extras.endpoint.http import Endpoint
from slipstream_extras.endpoint.metrics import ServeMetrics
from slipstream_extras.endpoint.openai import EndpointPlugin
from slipstream_extras.endpoint.versions import ClientLimiter, ServedVersions

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 1.0
_MIN_KEY_CHARACTERS = 16
_KEYS = "serve.api_key_file"


@contextlib.contextmanager
def listening(section: ServeSection, gpus: list[int]) -> Iterator[socket.socket]:
    """Open the endpoint's socket. Raises EndpointInUseError if another process has the port, ConfigError if this machine has no
    such address."""
    port = section.port + (gpus[0] if gpus and section.port else 0)
    with listen(section.host, port, "serve.host", "serve.port") as listener:
        yield listener


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - no client can connect to these
    return f"http://{_address(host, port)}/v1"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_keys(file: str | None) -> tuple[bytes, ...]:
    """Read the keys of clients. Raises ConfigError if the file is missing, not private, or has no usable key."""
    if file is None:
        return ()
    lines = read_private(Path(file), _KEYS).splitlines()
    keys = tuple(secret_line(line.strip(), f"{_KEYS}: {file}").encode() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < _MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{_KEYS}: {file}: expected one key of at least {_MIN_KEY_CHARACTERS} characters per line "
            f"(openssl rand -hex 32 > {file})"
        )
    return keys


class Serving:
    """The endpoint with all its parts. Clients may send `keys`; `agents` exist with posted rewards."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        keys: tuple[bytes, ...],
        engine: ServedEngine,
        registry: CollectorRegistry,
        agents: Agents | None = None,
        plugin: EndpointPlugin | None = None,
    ) -> None:
        settings = self._settings = config.serve
        self._name, self._folder = name, Path(config.run_dir) / "serve"
        self.versions = ServedVersions(
            engine.adapters, settings.max_versions, settings.version_ttl_s, is_merged=config.weights != "adapter"
        )
        share = engine.max_num_seqs if plugin is not None else max(1, engine.max_num_seqs // 4)
        limiter = ClientLimiter(settings.max_requests or share, settings.max_waiting)
        metrics = ServeMetrics(registry, limiter, agents, plugin)
        generation = ClientGeneration(engine, self.versions, limiter, metrics)
        endpoint = Endpoint(settings, keys, generation, agents, plugin)
        answer_s = settings.request_timeout_s + settings.receive_timeout_s  # the latter for its last bytes
        connections = ConnectionLimiter(settings.receive_timeout_s, answer_s, settings.max_connections, metrics.refuse)
        self._server = Server(endpoint, connections)
        self.problem: str | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until it is cancelled."""
        address = _address(*listener.getsockname()[:2])
        sweeping = asyncio.create_task(self._sweep())
        try:
            with announced(self._folder, "rl-producer", self._name, address):
                logger.info("OpenAI-compatible endpoint at http://%s/v1", address)
                await self._server.serve([listener])
        except asyncio.CancelledError:
            if self._server.started:
                await self._server.shutdown([listener])
            raise
        except Exception as error:
            self.problem = f"the endpoint ended: {type(error).__name__}: {error}"
            logger.exception("%s; the daemon goes on without it", self.problem)
        finally:
            sweeping.cancel()
            self.versions.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            self.versions.release_unused()
