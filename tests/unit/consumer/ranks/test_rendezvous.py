"""How hosts find one another, without any: the interface, and addresses that are none of this host."""

import errno
import os
from unittest import mock

import pytest

from consumer.ranks.placement import Nodes
from consumer.ranks.rendezvous import choose_interface, listen
from protocol.errors import ConfigError


def test_the_interface_is_the_one_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_host_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = OSError(errno.ENETUNREACH, "Network is unreachable")
    monkeypatch.setattr("consumer.ranks.rendezvous.socket.socket", mock.Mock(side_effect=unreachable))
    with pytest.raises(
        ConfigError, match=r"--rendezvous 10\.0\.0\.5: Network is unreachable; give an address of node 0"
    ):
        choose_interface("10.0.0.5")


def test_an_address_of_another_host_cannot_be_listened_at() -> None:
    with pytest.raises(ConfigError, match=r"--rendezvous: cannot listen at 192\.0\.2\.1:5600"):
        listen(Nodes(2, 0, "192.0.2.1", 5600))
