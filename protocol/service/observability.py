"""What both daemons open first: their metrics registry, their health and the port that serves both."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from protocol.config.run import RunConfig
from protocol.service import exposition
from protocol.service.health import Health
from protocol.service.metrics import Readings, add_process_metrics
from protocol.service.systemd import Notifier


class Watch(NamedTuple):
    """How a daemon is watched."""

    registry: CollectorRegistry
    health: Health


@contextlib.contextmanager
def watched(config: RunConfig, job: str, gpus: list[int], name: str = "") -> Iterator[Watch]:
    """Serves metrics and health until the context ends.

    Args:
        job: `rl-producer` or `rl-trainer`.
        gpus: of this daemon.
        name: of this daemon; host and process by default.

    Raises:
        EndpointInUseError: another process has the port.
        ConfigError: it cannot be listened at.
    """
    settings = config.observability
    if job == "rl-trainer":
        key, port = "trainer_metrics_port", settings.trainer_metrics_port
    else:
        key, port = "producer_metrics_port", settings.producer_metrics_port
        port += gpus[0] if gpus and port else 0
    registry = CollectorRegistry()
    add_process_metrics(registry, job.replace("-", "_"), gpus)
    health = Health(settings.unresponsive_after_s, Notifier.from_environment())
    add_health_metrics(registry, job.replace("-", "_"), health)
    name = name or f"{socket.gethostname()[:64]}-{os.getpid()}"
    folder = Path(config.run_dir) / "metrics"
    with exposition.serve(registry, health, settings.metrics_host, port, key=key, job=job, name=name, folder=folder):
        yield Watch(registry, health)


def add_health_metrics(registry: CollectorRegistry, prefix: str, health: Health) -> None:
    """Shows the checks of `/healthz` as metrics.

    Args:
        prefix: `rl_producer` or `rl_trainer`.
    """
    Readings(registry).gauges(
        f"{prefix}_check_failing",
        "1 while this check of /healthz fails, by what it looks at.",
        "check",
        lambda: {name: why is not None for name, why in health.alive().items()},
    )
