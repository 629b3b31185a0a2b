"""Where the relay of a host listens, and where producers of other hosts reach it.

Guarantee: without keys a relay listens on loopback alone.
"""

from typing import NamedTuple

from protocol.channel.channel import own_address
from protocol.config.operation import TransportSection, is_loopback
from protocol.errors import ConfigError


class RelayPlace(NamedTuple):
    """Two endpoints."""

    bound: str
    advertised: str


def relay_place(transport: TransportSection, trainer: str) -> RelayPlace:
    """For `transport.relay_port`; `trainer` is its endpoint. Raises ConfigError where nobody can tell which address of this host
    others reach."""
    host = transport.relay_host or (_address_towards(trainer) if transport.keys else "127.0.0.1")
    advertised = f"tcp://{host}:{transport.relay_port}"
    if is_loopback(advertised):
        return RelayPlace(advertised.replace("localhost", "127.0.0.1"), advertised)
    return RelayPlace(f"tcp://{'[::]' if host.startswith('[') else '*'}:{transport.relay_port}", advertised)


def _address_towards(trainer: str) -> str:
    if trainer.startswith("ipc://"):
        return "127.0.0.1"
    host = trainer.removeprefix("tcp://").rpartition(":")[0]
    try:
        own = own_address(host.strip("[]"))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"transport.relay_host: no way to {host} ({why}); give the address of this host") from error
    if "%" in own:
        raise ConfigError(f"transport.relay_host: {own} is known on this link alone; give another address of this host")
    return f"[{own}]" if ":" in own else own
