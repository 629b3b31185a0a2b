"""A run as the options of `slipstream cluster up` and the configuration ask for it.

Guarantee: pure. Paths are absolute, because daemons start in other folders. What contradicts itself is refused.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from slipstream.cluster.fleet.plan import Plan
from slipstream.cluster.probe import NodeFacts

_KEYS = ("adapter_dir", "key_file", "ca_file")


class Asked(NamedTuple):
    """The options of `slipstream cluster up`."""

    config: str
    overrides: list[str]
    address: str | None = None
    producers: int | None = None
    ranks: int = 1
    gpus: int = 1
    cpus: int = 1
    model: str | None = None
    producer_overrides: tuple[str, ...] = ()
    trainer_node: str | None = None
    backup: str = ""
    detach: bool = False


def check_gpu_use(config: RunConfig, num_gpus: int) -> None:
    """
    Args:
        num_gpus: of each producer; 0: everything computes on the CPU.

    Raises:
        ConfigError: trainer and producer are to be on one GPU, and whoever places daemons gives each GPUs of its own.
    """
    if num_gpus and config.pipeline.gpu != "own":
        raise ConfigError(
            f"pipeline.gpu: {config.pipeline.gpu} puts trainer and producer on one GPU, and slipstream cluster gives each daemon "
            "GPUs of its own; set pipeline.gpu=own, or start the pair by hand (docs/one-gpu.md)"
        )


def producer_gpus(config: RunConfig, num_gpus: int) -> int:
    """Of each producer, where each is to have `num_gpus`: the clients of `engine_server` use none."""
    return 0 if config.engine_server is not None else num_gpus


def server_files(config: RunConfig) -> dict[str, Path]:
    """Those that are given; none without `engine_server`. Relative names begin in the working directory."""
    given = {key: getattr(config.engine_server, key, None) for key in _KEYS}
    return {key: Path(os.path.abspath(os.path.expanduser(value))) for key, value in given.items() if value is not None}


def plan_of(asked: Asked, config: RunConfig, run_dir: Path, facts: NodeFacts) -> Plan:
    """The daemons meet over TCP with keys, because Ray may place them on any node."""
    transport, bounds = config.transport, config.producers
    least, most = (bounds.min, bounds.max) if bounds else (0, 0)
    producers = asked.producers or max(1, least)
    if bounds and not least <= producers <= most:
        raise ConfigError(
            f"--producers {producers}: the configuration has producers.min={least} and producers.max={most}"
        )
    model = os.path.expanduser(config.model.path)
    own = transport.endpoint if (transport.endpoint or "").startswith("tcp://") and transport.keys else None
    endpoint = own or f"tcp://{facts.host}:{facts.port}"
    keys = os.path.abspath(transport.keys) if transport.keys else str(run_dir / "cluster" / "keys")
    set_here = [] if own else [f"transport.keys={keys}", f"transport.endpoint={endpoint}"]
    places = [f"engine_server.{key}={json.dumps(str(place))}" for key, place in server_files(config).items()]
    return Plan(
        run_dir=str(run_dir),
        config=os.path.abspath(asked.config),
        folder=os.getcwd(),
        overrides=[*asked.overrides, *set_here],
        producer_overrides=[*places, *asked.producer_overrides],
        model=asked.model or (os.path.abspath(model) if os.path.isdir(model) else ""),
        ranks=asked.ranks,
        on_gpus=asked.gpus > 0,
        gpus=producer_gpus(config, asked.gpus),
        cpus=asked.cpus,
        host=facts.host,
        endpoint=endpoint,
        keys=keys,
        backup=os.path.abspath(asked.backup) if asked.backup else "",
        producers=producers,
        least=least,
        most=most,
    )
