"""Where a relay listens and is reached."""

import socket

import pytest

from protocol.config.operation import TransportSection
from protocol.errors import ConfigError
from slipstream_extras.relays.relay import relay_place


@pytest.mark.parametrize(
    ("keys", "host", "trainer", "place"),
    [
        (None, None, "tcp://127.0.0.1:5557", ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600")),
        (None, None, "ipc:///tmp/c", ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600")),
        (None, "localhost", "ipc:///tmp/c", ("tcp://127.0.0.1:5600", "tcp://localhost:5600")),
        ("keys", "gpu01.example", "tcp://10.0.0.5:5557", ("tcp://*:5600", "tcp://gpu01.example:5600")),
        ("keys", "[fe80::1]", "tcp://10.0.0.5:5557", ("tcp://[::]:5600", "tcp://[fe80::1]:5600")),
        ("keys", None, "tcp://127.0.0.1:5557", ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600")),
        ("keys", None, "ipc:///tmp/c", ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600")),
    ],
)
def test_by_configuration(keys: str | None, host: str | None, trainer: str, place: tuple[str, str]) -> None:
    transport = TransportSection(keys=keys, relay_port=5600, relay_host=host)
    assert relay_place(transport, trainer) == place


def test_an_address_that_only_a_neighbour_understands_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, address: object) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "fe80::1%eth0", 9

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(ConfigError, match=r"fe80::1%eth0 .* set transport.relay_host"):
        relay_place(TransportSection(keys="keys", relay_port=5600), "tcp://[fe80::2]:5557")


def test_a_trainer_that_cannot_be_found_leads_to_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"trainer \(Name or service not known\); set transport.relay_host"):
        relay_place(TransportSection(keys="keys", relay_port=5600), "tcp://trainer:5557")
