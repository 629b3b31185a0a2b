"""Whatever a relay or a producer of the same host does, the policy arrives, from the next source or from the trainer."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from protocol.channel.keys import SecretKey
from protocol.errors import ConfigError
from protocol.runtime import scratch as shared_memory
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobProgress,
    BlobRequest,
    PolicyOffer,
    RelayAddress,
    RelayMessage,
    RelayPeer,
    RelayPeers,
    RelayRequest,
)
from slipstream_extras.relays.host_cache import Claim, HostCache
from slipstream_extras.relays.relay import Downloads, Relay, RelayPlace
from slipstream_extras.relays.sources import Found, PolicySources
from tests.unit.protocol.channel_harness import eventually, reserve_port
from tests.unit.slipstream_extras.relays.scripted_relay import (
    BLOB,
    PATIENCE_S,
    POLICY,
    TRANSPORT,
    Answer,
    honest,
    made_cache,
    neighbours,
    relaying,
    scripted,
    store,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostCache:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    return made_cache(tmp_path, "here")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a source is to be left; still long for one that answers."""
    monkeypatch.setattr("slipstream_extras.relays.relay_download.PATIENCE_S", 1.0)


def find(asking: PolicySources, *relays: RelayAddress) -> Found:
    return asking.find(POLICY, PolicyOffer(POLICY.digest, relays=list(relays)), threading.Event())


def take(asking: PolicySources, claim: Claim, blob: bytes = BLOB) -> bool:
    """As it comes from the trainer."""
    into = claim.room(len(blob))
    into[:] = blob
    try:
        return asking.take_from_trainer(POLICY, into, claim, 1.0)
    finally:
        claim.release()


def is_left_to_the_trainer(found: Found, cache: HostCache) -> bool:
    """With the right to download it."""
    others = cache.claim(POLICY.digest)
    found.claim.release()
    return found.blob is None and others is None


def test_a_relay_hands_on_what_its_host_has_and_the_host_that_got_it_does_so_too(
    here: HostCache, tmp_path: Path
) -> None:
    first = made_cache(tmp_path, "first")
    store(first)
    asking, last = neighbours(here), neighbours(made_cache(tmp_path, "last"))
    with relaying(first) as (relay, one), relaying(here) as (_, two):
        assert find(asking, RelayAddress(one)).blob == BLOB
        assert find(last, RelayAddress(two)).blob == BLOB
        assert find(neighbours(here)).blob == BLOB, "another producer of the host"
    assert (asking.counts.downloads["relay"], last.counts.downloads["relay"]) == (1, 1)
    assert relay.num_bytes == len(BLOB)
    assert relay.endpoint == "", "it has ended"


def test_a_relay_whose_host_still_downloads_is_waited_for(here: HostCache, tmp_path: Path) -> None:
    far = made_cache(tmp_path, "far")
    claim = far.claim(POLICY.digest)
    assert claim is not None

    def arrive() -> None:
        for done in range(1024, len(BLOB), 1024):
            claim.note(done)
            time.sleep(0.01)
        claim.room(len(BLOB))[:] = BLOB
        claim.share()
        claim.release()

    arriving = threading.Thread(target=arrive)
    with relaying(far) as (_, endpoint):
        arriving.start()
        assert find(neighbours(here), RelayAddress(endpoint)).blob == BLOB
    arriving.join()


def dies_in_the_middle() -> Answer:
    served: list[RelayRequest] = []

    def answer(request: RelayRequest) -> RelayMessage:
        served.append(request)
        if len(served) == 6:
            raise EOFError
        return honest(request)

    return answer


def lies(request: RelayRequest) -> RelayMessage:
    if isinstance(request, BlobRequest):
        return BlobChunk(request.digest, request.offset, bytes(request.length))
    return honest(request)


def stalls(request: RelayRequest) -> RelayMessage | None:
    return None if isinstance(request, BlobRequest) and request.offset > 0 else honest(request)


BAD: dict[str, list[Callable[[], Answer]]] = {
    "silent": [dies_in_the_middle, lambda: stalls, lambda: lambda request: None],
    "wrong": [lambda: lies],
    "missing": [lambda: lambda request: BlobMissing(request.digest)],
}


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("why", "bad"), [(why, bad) for why, each in BAD.items() for bad in each])
def test_a_bad_relay_costs_a_retry_at_the_next_or_at_the_trainer(
    here: HostCache, why: str, bad: Callable[[], Answer]
) -> None:
    asking = neighbours(here)
    with scripted(bad()) as relay:
        assert is_left_to_the_trainer(find(asking, relay), here)
    with scripted(bad()) as relay, scripted(honest) as other:
        assert find(asking, relay, other).blob == BLOB
    left = asking.counts.left
    if why == "silent":  # on a busy machine what arrived before may have come so slowly that this is the first reason
        left = left | {"silent": left["silent"] + left["slow"], "slow": 0}
    assert left == dict.fromkeys(left, 0) | {why: 2}


def test_a_relay_that_lied_is_not_asked_again(here: HostCache) -> None:
    asking, asked = neighbours(here), list[RelayRequest]()

    def answer(request: RelayRequest) -> RelayMessage:
        asked.append(request)
        return lies(request)

    with scripted(answer) as relay:
        find(asking, relay).claim.release()
        before = len(asked)
        find(asking, relay).claim.release()
    assert len(asked) == before > 0


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_relay_that_is_always_about_to_have_it_is_left(here: HostCache) -> None:
    said: list[int] = []

    def answer(request: RelayRequest) -> RelayMessage:
        said.append(1)
        return BlobProgress(request.digest, len(said))

    asking = neighbours(here)
    with scripted(answer) as relay:
        assert is_left_to_the_trainer(find(asking, relay), here)
    assert asking.counts.left["slow"] == 1


def test_a_cancelled_search_ends(here: HostCache) -> None:
    cancelled, asking = threading.Event(), neighbours(here)

    def answer(request: RelayRequest) -> RelayMessage | None:
        cancelled.set()
        return BlobProgress(request.digest, 0)

    with scripted(answer) as relay:
        found = asking.find(POLICY, PolicyOffer(POLICY.digest, relays=[relay]), cancelled)
    assert is_left_to_the_trainer(found, here)
    assert sum(asking.counts.left.values()) == 0


def test_the_download_of_a_producer_that_is_killed_is_taken_over(here: HostCache) -> None:
    holder = (
        "import time; from pathlib import Path; from slipstream_extras.relays.host_cache import HostCache\n"
        f"HostCache(Path({str(here.folder)!r})).claim({POLICY.digest!r}).note(9); print('held', flush=True); time.sleep(600)"
    )
    waiting, found = neighbours(here), list[Found]()
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        search = threading.Thread(target=lambda: found.append(find(waiting)))
        search.start()
        time.sleep(0.1)
        process.kill()
        process.wait()
        search.join(PATIENCE_S)
    assert take(waiting, found[0].claim)
    assert find(neighbours(here)).blob == BLOB


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_producer_that_stands_still_is_not_waited_for(here: HostCache) -> None:
    stopped = here.claim(POLICY.digest)
    assert stopped is not None
    found = find(neighbours(here))
    assert found.blob is None
    stopped.release()


def test_what_cannot_be_stored_is_downloaded_by_each(here: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    first, waiting, found = neighbours(here), neighbours(here), list[Found]()
    claim = find(first).claim
    search = threading.Thread(target=lambda: found.append(find(waiting)))
    search.start()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert take(first, claim)
    search.join(PATIENCE_S)
    assert found[0].blob is None
    assert take(waiting, found[0].claim)
    assert not here.has(POLICY.digest)
    monkeypatch.setattr(HostCache, "has_room", lambda self, num_bytes: False)
    assert not here.claim(POLICY.digest).note(0)  # type: ignore[union-attr]
    assert find(waiting).blob is None, "it does not wait where nothing would fit"


def test_a_host_without_room_does_not_say_that_it_relays(here: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with relaying(here) as (relay, endpoint):
        relays = PolicySources("here-1-aa", TRANSPORT, None, here, relay)
        eventually(lambda: relays.relay_endpoint == endpoint, "the relay")
        with monkeypatch.context() as full:
            full.setattr(HostCache, "has_room", lambda self, num_bytes: False)
            find(relays)
        assert relays.relay_endpoint == ""
        find(relays).claim.release()
        assert relays.relay_endpoint == endpoint


def test_of_two_producers_of_a_host_the_one_that_has_the_port_relays_until_it_ends(
    here: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream_extras.relays.relay._BIND_EVERY_S", 0.05)
    with ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{reserve_port(stack)}"
        first, second = (Relay(here, lambda: RelayPlace(endpoint, endpoint), 65_536, None) for _ in range(2))
        stack.callback(second.stop)
        first.start()
        eventually(lambda: first.endpoint, "the first")
        second.start()
        first.stop()
        assert first.endpoint == ""
        eventually(lambda: second.endpoint == endpoint, "the second")


def test_a_relay_that_does_not_know_its_address_tries_again(here: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_extras.relays.relay._BIND_EVERY_S", 0.05)
    problems: list[Exception] = [RuntimeError("nobody foresaw this"), ConfigError("no way to trainer")]
    with ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{reserve_port(stack)}"

        def place() -> RelayPlace:
            if problems:
                raise problems.pop()
            return RelayPlace(endpoint, endpoint)

        relay = Relay(here, place, 65_536, None)
        stack.callback(relay.stop)
        relay.start()
        eventually(lambda: relay.endpoint, "its address")


def test_a_ninth_download_is_sent_elsewhere_until_another_ends() -> None:
    downloads = Downloads()
    peers = [str(number).encode() for number in range(9)]
    assert [downloads.admit(peer, 0.0) for peer in peers] == [True] * 8 + [False]
    assert downloads.admit(peers[0], 4.0)
    assert not downloads.admit(peers[8], 4.9)
    assert downloads.admit(peers[8], 5.0), "seven have not asked for 5 s"
    assert all(downloads.admit(b"one/1/%d" % number, 20.0) for number in range(9)), "one after the other"


def test_a_damaged_file_of_the_cache_is_removed(here: HostCache) -> None:
    store(here)
    assert here.folder is not None
    (here.folder / POLICY.digest).write_bytes(bytes(len(BLOB)))
    asking = neighbours(here)
    assert is_left_to_the_trainer(find(asking), here)
    assert not here.has(POLICY.digest)
    assert not take(asking, find(asking).claim, bytes(len(BLOB)))
    assert not here.has(POLICY.digest), "and a wrong one does not get in"


@pytest.fixture
def keys() -> tuple[SecretKey, SecretKey]:
    """Of a relay and of one who asks."""
    return SecretKey(zmq.curve_keypair()[1]), SecretKey(zmq.curve_keypair()[1])


def peers(**owners: SecretKey) -> RelayPeers:
    return RelayPeers([RelayPeer(name, secret.public().decode()) for name, secret in owners.items()])


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_with_keys_a_relay_serves_whom_the_trainer_named_and_nobody_else(
    here: HostCache, tmp_path: Path, keys: tuple[SecretKey, SecretKey]
) -> None:
    far = made_cache(tmp_path, "far")
    store(far)
    of_relay, own = keys
    asking, stranger = neighbours(here, secret=own), neighbours(here, "mallory-1-aa", SecretKey(zmq.curve_keypair()[1]))
    with relaying(far, of_relay) as (relay, endpoint):
        serving = PolicySources("far-1-aa", asking.transport, of_relay, far, relay)
        address = RelayAddress(endpoint, of_relay.public().decode())
        assert is_left_to_the_trainer(find(asking, address), here), "nobody is named yet"
        serving.admit(peers(child=own))
        assert is_left_to_the_trainer(find(stranger, address), here)
        assert is_left_to_the_trainer(find(neighbours(here), RelayAddress(endpoint)), here), "one without a key"
        other = RelayAddress(endpoint, own.public().decode())
        assert is_left_to_the_trainer(find(asking, other), here), "a relay that has not the key which the trainer said"
        found = find(asking, address)
        assert found.blob == BLOB
        here.drop(POLICY.digest)
        serving.admit(None)
        assert is_left_to_the_trainer(find(asking, address), here), "the trainer is away"
    assert relay.num_bytes == len(BLOB)


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_whom_a_producer_does_not_even_ask(here: HostCache, keys: tuple[SecretKey, SecretKey]) -> None:
    asked: list[RelayRequest] = []
    with scripted(lambda request: asked.append(request)) as relay:
        assert is_left_to_the_trainer(find(neighbours(here, secret=keys[1]), relay), here), "it has no key"
    elsewhere = RelayAddress("tcp://192.0.2.1:5600")
    assert is_left_to_the_trainer(find(neighbours(here), elsewhere), here), "another host, without keys"
    assert is_left_to_the_trainer(find(neighbours(here), RelayAddress("tcp://127.0.0.1:99999")), here), "no port"
    assert asked == []
