"""The rendezvous of a trainer's ranks, on one host or on several.

Guarantee: rank 0's host alone listens, at one address and no other. Ranks of a host whose configuration, model or libraries
differ from those of rank 0 are refused on both hosts, with what differs. Nothing but text and numbers is exchanged.
"""

import datetime
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil
import torch.distributed as dist

from consumer.ranks.placement import Nodes
from consumer.ranks.presence import Heartbeats
from consumer.waiting import StopRequested
from protocol import __version__
from protocol.channel.channel import own_address
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, cannot_listen
from protocol.wire.model_folder import base_model_digest
from protocol.wire.model_source import resolve_model

logger = logging.getLogger(__name__)

FOREVER_S = 30 * 86_400.0  # of collective operations: who is gone is noticed by `consumer.ranks.presence`
_FOREVER = datetime.timedelta(seconds=FOREVER_S)
_CONNECT = datetime.timedelta(seconds=10)
_SAY_EVERY_S = 30.0
_LOOK_EVERY_S = 0.2
OVER, GONE = "over", "gone"
"""Keys of the store: how the trainer ended; by node, that it has heard so."""
_SECTIONS = ("model", "lora", "trainer", "sampling", "pipeline", "correction", "advantage", "rewards", "seed")
_LIBRARIES = ("torch", "trl", "transformers", "peft")


class Joining(msgspec.Struct, frozen=True):
    """The message of another host that joins."""

    num_ranks: int
    facts: dict[str, str]


class Joined(msgspec.Struct, frozen=True):
    """The answer: its place, or the reason why it has none."""

    first_rank: int
    world: int
    refused: str = ""


def facts_of(config: RunConfig) -> dict[str, str]:
    """Return the facts that must be equal on all hosts, by the names that users know."""
    sections = config.model_dump(
        mode="json", include=set(_SECTIONS), exclude={"model": {"path"}, "lora": {"init_from"}}
    )
    trusted = config.model.trust_remote_code
    folder = resolve_model(config.model.path, config.model.revision, trust_remote_code=trusted)
    return (
        {name: msgspec.json.encode(value, order="sorted").decode() for name, value in sections.items()}
        | {"files of model.path": base_model_digest(folder, trust_remote_code=trusted), "release": __version__}
        | {f"release of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    )


def listen(nodes: Nodes) -> dist.Store:
    """The store of rank 0's host. One that binds itself listens at every address.

    Raises:
        SlipstreamError: the address cannot be bound.
    """
    try:
        listener = socket.create_server((nodes.host, nodes.port))
    except OSError as error:
        fix = "Give this run another port, on all hosts"
        raise cannot_listen(error, f"{nodes.host}:{nodes.port}", "--rendezvous", fix) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        nodes.host, port, is_master=True, timeout=_FOREVER, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect(host: str, port: int) -> dist.Store:
    """A connection of its own; those of one store object wait for one another.

    Raises:
        RuntimeError: no host answers there.
    """
    store = dist.TCPStore(host, port, is_master=False, timeout=_CONNECT)
    store.set_timeout(_FOREVER)
    return store


def gather_hosts(
    store: dist.Store, nodes: Nodes, num_ranks: int, facts: Mapping[str, str], stop: Callable[[], bool]
) -> list[range]:
    """Wait, on rank 0's host, for the others, and send each its place.

    Args:
        num_ranks: of this host.
        stop: whether to wait no longer.

    Returns:
        The ranks of each host, by its number.

    Raises:
        ConfigError: a host differs in what must be equal.
        StopRequested: instead of waiting.
    """
    counts = [num_ranks]
    for node in range(1, nodes.count):
        key = f"joining/{node}"
        _wait(lambda: bool(store.check([key])), f"node {node} of {nodes.count}", stop)  # noqa: B023  called here only
        joining = msgspec.json.decode(store.get(key), type=Joining)
        differs = sorted(name for name in facts if joining.facts.get(name) != facts[name])
        if differs:
            what = ", ".join(differs)
            why = f"node {node} differs from node 0 in {what}; all need the same configuration, files and releases"
            store.set(f"joined/{node}", msgspec.json.encode(Joined(0, 0, why)).decode())
            until_heard(store, [node])
            raise ConfigError(why)
        counts.append(joining.num_ranks)
    hosts = [range(sum(counts[:node]), sum(counts[: node + 1])) for node in range(nodes.count)]
    for node, ranks in enumerate(hosts[1:], 1):
        store.set(f"joined/{node}", msgspec.json.encode(Joined(ranks.start, hosts[-1].stop)).decode())
    return hosts


def reach(nodes: Nodes) -> dist.Store:
    """Wait, on another host, for rank 0's."""
    store: list[dist.Store] = []

    def reached() -> bool:
        try:
            with socket.create_connection((nodes.host, nodes.port), timeout=2):
                pass
            store.append(connect(nodes.host, nodes.port))
        except (OSError, RuntimeError):
            return False
        return True

    _wait(reached, f"node 0 at {nodes.host}:{nodes.port}")
    return store[0]


def join(store: dist.Store, nodes: Nodes, num_ranks: int, facts: dict[str, str], signs: Heartbeats) -> Joined:
    """Wait, on another host, for its place.

    Raises:
        ConfigError: this host differs in what must be equal.
    """
    key = f"joined/{nodes.rank}"

    def placed() -> bool:
        signs.send()
        return bool(store.check([key]))

    signs.send()
    store.set(f"joining/{nodes.rank}", msgspec.json.encode(Joining(num_ranks, facts)).decode())
    _wait(placed, "the other nodes")
    joined = msgspec.json.decode(store.get(key), type=Joined)
    if joined.refused:
        store.set(f"{GONE}/{nodes.rank}", "")
        raise ConfigError(joined.refused)
    return joined


def until_heard(store: dist.Store, nodes: Sequence[int], within_s: float = 5.0) -> None:
    """Wait a little, until these nodes have read what was said last. With this process the store ends."""
    deadline = time.monotonic() + within_s
    while not store.check([f"{GONE}/{node}" for node in nodes]) and time.monotonic() < deadline:
        time.sleep(0.05)


def choose_interface(host: str) -> None:
    """Choose, for gloo and NCCL, the network interface from which `host` is reached.

    Raises:
        ConfigError: there is none.
    """
    try:
        own = own_address(host, socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--rendezvous {host}: {why}; give an address of node 0 that all hosts reach") from error
    for name, addresses in psutil.net_if_addrs().items():
        if own in {address.address for address in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _wait(until: Callable[[], bool], what: str, stop: Callable[[], bool] = lambda: False) -> None:
    said = time.monotonic()
    while not until():
        if stop():
            raise StopRequested
        time.sleep(_LOOK_EVERY_S)
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            logger.info("waiting for %s", what)
