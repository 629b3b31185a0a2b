"""By which address of its own a host reaches another."""

import socket


def own_address(host: str, family: int = socket.AF_UNSPEC) -> str:
    """The address of the interface that leads to `host`, without brackets. Nothing is sent. Raises OSError if none does.

    Args:
        host: a name or an address.
        family: of the addresses, where it matters which `host` has.
    """
    family, *_, address = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
