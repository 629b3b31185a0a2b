"""What strangers, impostors and floods can do at a trainer's door: nothing is delivered, nothing grows, a counter rises, and
a producer with a right to be there does not notice.
"""

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from benchmarks.groups import ENGINE_FACTS
from campaigns.fuzz.zmtp import greeting
from protocol.channel.client import ZmqClient
from protocol.channel.connection_quota import limits
from protocol.channel.keys import AUTHORIZED, ProducerKeys, generate, producer_keys
from protocol.wire.codec import encode
from protocol.wire.messages import Ack, Heartbeat, Hello, Nack, Reject, Welcome
from tests.faults.door import DESCRIPTORS
from tests.faults.doors import LIMIT, Door, Honest, show_keys
from tests.faults.memory import memory_bounded
from tests.unit.protocol.channel_harness import eventually, receive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MAX_UNFINISHED = limits(DESCRIPTORS).unfinished


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def door(stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Door:
    keys = tmp_path_factory.mktemp("keys")
    generate(keys, "trainer")
    return Door(stack, tmp_path_factory.mktemp("door"), keys)


@pytest.fixture(scope="module")
def honest_keys(door: Door) -> ProducerKeys:
    return door.identity("honest")


@pytest.fixture(scope="module")
def mallory(door: Door) -> ProducerKeys:
    """Authorized, and up to no good."""
    return door.identity("mallory")


@pytest.fixture(scope="module")
def honest(stack: ExitStack, door: Door, honest_keys: ProducerKeys) -> Honest:
    producer = Honest(door.client("honest-1-aaaa", honest_keys), "honest-1-aaaa")
    stack.callback(producer.stop)
    producer.start().wait_for_acks()
    return producer


@pytest.fixture(scope="module")
def descriptors_at_rest(door: Door, honest: Honest) -> int:
    process = psutil.Process(door.process.pid)

    def ports() -> set[int]:
        return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED}

    eventually(lambda: ports() == set(door.ports), "both connections of the honest producer")
    return process.num_fds()


@pytest.fixture(autouse=True)
def nobody_stays(door: Door, descriptors_at_rest: int) -> Iterator[None]:
    """Let the next test begin when the door has counted the end of every peer of this one."""
    yield
    for port in door.ports:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as last:
            last.recv(1)  # it is let in after those that came before
    process = psutil.Process(door.process.pid)
    eventually(lambda: process.num_fds() <= descriptors_at_rest, "only the honest producer's connections")


@contextmanager
def refused_only(door: Door, honest: Honest, reason: str, at_least: int = 1, also: str = "") -> Iterator[None]:
    """`reason` is counted, nothing else is but `also`, and honest work goes on during and after it on the same session.

    A client that is closed while ZeroMQ tries once more may leave at its greeting, as one without keys does.
    """
    before, told = door.look(), door.told_of("honest-1-aaaa")
    yield
    eventually(lambda: door.refused(reason) >= before["refusals"][reason] + at_least, f"refusals for {reason}")
    honest.wait_for_acks()
    after = door.look()
    changed = {name for name, count in after["refusals"].items() if count != before["refusals"][name]}
    assert changed <= {reason, also, "no_key"}
    assert door.told_of("honest-1-aaaa") == told, "it neither left nor joined anew"
    assert "duplicate" not in {ack.outcome for ack in honest.acks}
    for count in ("bad_frames", "invalid"):
        assert after["counts"].get(count, 0) == before["counts"].get(count, 0), count


@contextmanager
def relayed(port: int, bytes_per_s: float = 1e9) -> Iterator[tuple[int, bytearray]]:
    """A port in front of `port` for one connection, and everything that was sent to it."""
    recorded = bytearray()

    def relay(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                seen += data
                target.sendall(data)
                time.sleep(len(data) / bytes_per_s)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=relay, args=(far, near, bytearray()))
            back.start()
            relay(near, far, recorded)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], recorded
        thread.join()


def cannot_send(client: ZmqClient, reason: Callable[[], bool]) -> None:
    """Nothing leaves `client` while it is refused."""
    try:
        eventually(lambda: client.poll(0.01) or client.send(Hello("p", ENGINE_FACTS, 1)) or reason(), "a refusal")
        assert not client.send(Hello("p", ENGINE_FACTS, 1))
    finally:
        client.close()


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("no_key", "ends the handshake: it wants keys. Set transport.keys"),
        ("unknown_key", "does not know the key of stranger (SHA256:"),
        ("wrong_server_key", "ends the handshake: it has another key than"),
    ],
)
def test_who_has_not_the_right_keys_is_kept_out_and_told(
    door: Door, honest: Honest, caplog: pytest.LogCaptureFixture, tmp_path: Path, reason: str, said: str
) -> None:
    generate(tmp_path, "trainer")
    generate(tmp_path, "stranger")
    if reason == "unknown_key":
        shutil.copy(door.keys / "trainer.public", tmp_path)
    keys = None if reason == "no_key" else producer_keys(tmp_path, "stranger")
    before = door.refused(reason)
    with refused_only(door, honest, reason), caplog.at_level(logging.WARNING):
        client = door.client("stranger-1-aaaa", keys)
        cannot_send(client, lambda: said in caplog.text and door.refused(reason) > before)
    assert f"the trainer at {door.endpoints[0]} {said}" in caplog.text


def test_a_producer_cannot_take_another_ones_name(door: Door, honest: Honest, mallory: ProducerKeys) -> None:
    routing_ids = ["mallory-1-aaaa", "honest-1-aaaa", "honest-1"]
    stolen = Nack(honest.groups[-1].lease_id, "generation_failed")
    with refused_only(door, honest, "wrong_identity", at_least=len(routing_ids)):
        for routing_id in routing_ids:
            client = door.client(routing_id, mallory)
            try:
                eventually(lambda c=client: c.send(Hello("honest-1-aaaa", ENGINE_FACTS, 1)), "a connection")
                [answer] = receive(client, 1)
                assert isinstance(answer, Reject)
                assert answer.problems[0].startswith("this key is that of mallory, and not of 'honest-1")
                assert client.send(stolen)
            finally:
                client.close()


def test_a_revoked_producer_is_cut_off_and_may_come_back(door: Door, honest: Honest) -> None:
    keys = door.identity("leaver")
    client = door.client("leaver-1-aaaa", keys)
    try:
        eventually(lambda: client.send(Hello("leaver-1-aaaa", ENGINE_FACTS, 0)), "a connection")
        assert isinstance(receive(client, 1)[0], Welcome)
        with refused_only(door, honest, "revoked", also="unknown_key"):  # ZeroMQ tries once more
            (door.keys / AUTHORIZED / "leaver.public").unlink()
            eventually(lambda: client.poll(0.01) or not client.send(Nack("x", "returned")), "the end of the connection")
        shutil.copy(door.keys / "leaver.public", door.keys / AUTHORIZED)
        eventually(lambda: client.poll(0.01) or client.send(Hello("leaver-1-aaaa", ENGINE_FACTS, 0)), "a connection")
        assert isinstance(receive(client, 1)[0], Welcome)
    finally:
        client.close()


def test_a_frame_that_is_too_large_ends_its_connection(door: Door, honest: Honest, mallory: ProducerKeys) -> None:
    with ExitStack() as stack:
        raw = door.raw(stack, mallory, door.ports[0])
        with refused_only(door, honest, "oversized"), memory_bounded(100, door.process.pid):
            raw.send(bytes(64 * LIMIT))
            eventually(lambda: door.refused("oversized"), "the refusal")


def test_a_message_of_too_many_parts_ends_its_connection(door: Door, honest: Honest, mallory: ProducerKeys) -> None:
    """ZeroMQ sends a message only when it has all of it; a slow line stretches it into one that does not end."""
    with relayed(door.ports[0], bytes_per_s=100 * LIMIT) as (port, _), ExitStack() as stack:
        raw = door.raw(stack, mallory, port)
        with refused_only(door, honest, "multipart"), memory_bounded(100, door.process.pid):
            raw.send_multipart([bytes(60_000)] * 3500)
            eventually(lambda: door.refused("multipart"), "the refusal")


def test_idle_connections_are_few_and_short_and_keep_nobody_out(door: Door, honest: Honest) -> None:
    before = psutil.Process(door.process.pid).num_fds()
    keys = door.identity("latecomer")
    timed_out = door.refused("handshake_timeout")
    with ExitStack() as idle, memory_bounded(100, door.process.pid):
        at_least, also = 2 * (200 - MAX_UNFINISHED - 1), "handshake_timeout"  # of the first, if the others take long
        with refused_only(door, honest, "too_many_connections", at_least=at_least, also=also):
            for port in door.ports:
                for _ in range(200):
                    idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            late = Honest(door.client("latecomer-1-aaaa", keys), "latecomer-1-aaaa").start()
            late.wait_for_acks(1)
            late.stop()
        most = before + 2 * MAX_UNFINISHED + 16
        eventually(lambda: psutil.Process(door.process.pid).num_fds() <= most, "closed descriptors of the surplus")
        wanted = timed_out + MAX_UNFINISHED - 4
        eventually(lambda: door.refused("handshake_timeout") >= wanted, "the end of the others")
        honest.wait_for_acks()
    eventually(lambda: psutil.Process(door.process.pid).num_fds() <= before + 4, "closed descriptors")


def test_one_key_cannot_keep_the_others_out(door: Door, honest: Honest, mallory: ProducerKeys) -> None:
    """Neither by saying something over more connections than there are places nor by saying nothing."""
    most = limits(DESCRIPTORS)
    keys = door.identity("another")
    num_silent = most.connections - most.of_one_key
    with ExitStack() as flood, memory_bounded(100, door.process.pid):
        context = flood.enter_context(zmq.Context())

        def connect(number: int) -> "zmq.Socket[bytes]":
            dealer = flood.enter_context(context.socket(zmq.DEALER))
            dealer.linger, dealer.reconnect_ivl = 0, 100  # who is shut comes back
            dealer.routing_id = f"mallory-{number}-bbbb/1/{number}".encode()
            show_keys(dealer, mallory)
            dealer.connect(door.endpoints[0])
            return dealer

        def say(*speakers: "zmq.Socket[bytes]") -> None:
            for speaker in speakers:
                with suppress(zmq.Again):
                    speaker.send(encode(Heartbeat(0, 0, [], 0, 0.0)), zmq.NOBLOCK)

        for first in range(0, most.of_one_key, 24):
            some = [connect(number) for number in range(first, first + 24)]
            say(*some)
            eventually(lambda some=some: all(one.poll(0) for one in some), "answers")
        with refused_only(door, honest, "too_many_of_one_key", at_least=20):
            more = [connect(number) for number in range(most.of_one_key, most.of_one_key + 20)]
            eventually(lambda: say(*more) or door.refused("too_many_of_one_key") >= 20, "those that are too many")
        also = "too_many_of_one_key"  # what was on its way
        num_places = most.finished - most.of_one_key
        with refused_only(door, honest, "too_many_connections", at_least=num_silent - num_places, also=also):
            for number in range(num_silent):
                connect(1000 + number)
        with refused_only(door, honest, "too_many_connections", also=also):
            late = Honest(door.client("another-1-aaaa", keys), "another-1-aaaa").start()
            late.wait_for_acks(1)
            late.stop()


def test_a_handshake_that_swells_is_cut_off(door: Door, honest: Honest) -> None:
    with refused_only(door, honest, "bad_handshake"), memory_bounded(100, door.process.pid):
        say_and_wait_for_the_end(
            door, greeting(b"CURVE") + b"\x06" + (LIMIT - 1).to_bytes(8, "big") + bytes(LIMIT // 2)
        )


def say_and_wait_for_the_end(door: Door, what: bytes) -> None:
    with socket.create_connection(("127.0.0.1", door.ports[0]), timeout=20) as peer, suppress(ConnectionError):
        peer.sendall(what)
        while peer.recv(4096):
            pass


def test_a_recorded_connection_opens_no_second_one(door: Door, honest: Honest, mallory: ProducerKeys) -> None:
    """Every byte that a producer sent, sent again."""
    with relayed(door.ports[0]) as (port, recorded):
        client = ZmqClient("mallory-1-aaaa", f"tcp://127.0.0.1:{port}", door.endpoints[1], LIMIT, mallory)
        eventually(lambda: client.send(Hello("mallory-1-aaaa", ENGINE_FACTS, 0)), "a connection")
        assert isinstance(receive(client, 1)[0], Welcome)
        client.close()
    log = door.log.read_text().count("producer mallory-1-aaaa joined")
    with refused_only(door, honest, "bad_handshake"):
        say_and_wait_for_the_end(door, recorded)
    assert door.log.read_text().count("producer mallory-1-aaaa joined") == log


def test_groups_of_another_producer_sent_again_change_nothing(
    door: Door, honest: Honest, mallory: ProducerKeys
) -> None:
    settled = [group for group in honest.groups if group.lease_id in {ack.lease_id for ack in honest.acks}][:20]
    client = door.client("mallory-2-aaaa", mallory)
    before = door.look()["counts"]
    try:
        eventually(lambda: client.send(Hello("mallory-2-aaaa", ENGINE_FACTS, 0)), "a connection")
        assert isinstance(receive(client, 1)[0], Welcome)
        for group in settled:
            assert client.send(group)
        answers = [message for message in receive(client, len(settled)) if isinstance(message, Ack)]
    finally:
        client.close()
    assert {answer.outcome for answer in answers} == {"duplicate"}
    honest.wait_for_acks()
    after = door.look()["counts"]
    assert after["duplicate"] - before.get("duplicate", 0) == len(settled)


def test_a_message_without_end_from_a_peer_without_keys(stack: ExitStack, tmp_path: Path) -> None:
    """Written by hand, over a line of 2 Gb/s at most: what is kept is what arrives until the guard comes round."""
    door = Door(stack, tmp_path, None)
    honest = Honest(door.client("honest-1-aaaa", None), "honest-1-aaaa").start()
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    part = (b"\x03" + (50_000).to_bytes(8, "big") + bytes(50_000)) * 20
    try:
        honest.wait_for_acks()
        with refused_only(door, honest, "multipart", at_least=2), memory_bounded(300, door.process.pid):
            for _ in range(2):
                with socket.create_connection(("127.0.0.1", door.ports[0])) as peer, suppress(ConnectionError):
                    peer.sendall(greeting(b"NULL") + ready)
                    answer = b""
                    while b"READY" not in answer:  # only then is the handshake over for the guard too
                        more = peer.recv(4096)
                        assert more
                        answer += more
                    while True:
                        peer.sendall(part)
                        time.sleep(len(part) / 250e6)
    finally:
        honest.stop()


def test_nobody_is_let_in_when_the_authenticator_is_dead(
    door: Door, honest: Honest, honest_keys: ProducerKeys, mallory: ProducerKeys
) -> None:
    """The last test at this door."""
    door.look("stop authenticator")
    with refused_only(door, honest, "authenticator_dead"):
        cannot_send(door.client("mallory-3-aaaa", mallory), lambda: door.refused("authenticator_dead") > 0)
    said = "the authenticator is dead: no producer can connect any more"
    eventually(lambda: said in door.log.read_text(), "what the door says of it")
    log = door.log.read_text()
    for secret in door.keys.glob("*.secret"):
        assert secret.read_text().split()[2] not in log
