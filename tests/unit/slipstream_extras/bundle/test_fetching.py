"""The bundle arrives whole and as named, or the reason why not is told, over real sockets."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from consumer.link.offered_bundle import OfferedBundle
from protocol.errors import BundleError, ConfigError, ExitCode, NoAnswerError
from protocol.wire.messages import BlobRequest, BundleRequest, Reject
from slipstream_extras.bundle.bundle import LARGEST_BUNDLE_BYTES, digest_of
from slipstream_extras.bundle.joining import BundleFetch, FetchedBundle
from slipstream_extras.bundle.trainer_address import TrainerAddress, trainer_address
from tests.unit.protocol.channel_harness import PATIENCE_S, eventually, reserve_port
from tests.unit.slipstream_extras.bundle.bundle_server import BundleServer, bundle_of, make_keys, offer_of, served

DATA = bundle_of()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_extras.bundle.joining._TICK_S", 0.02)


def fetch(address: TrainerAddress, wait_s: float = 30.0, name: str = "gpu01-1-aa") -> FetchedBundle:
    return BundleFetch(name, address, wait_s).run()


def ipc(folder: Path) -> TrainerAddress:
    return trainer_address(f"ipc://{folder}/control.ipc", None, [])


def test_it_comes_in_chunks_and_is_what_was_named(stack: ExitStack, short_dir: Path) -> None:
    server = served(stack, short_dir, DATA)
    assert len(DATA) > 2 * 64
    assert fetch(ipc(short_dir)) == FetchedBundle(DATA, digest_of(DATA), f"ipc://{short_dir}/control.ipc.blobs")
    lengths = [message.length for message in server.received if isinstance(message, BlobRequest)]
    assert lengths == [64] * (len(DATA) // 64) + [len(DATA) % 64]


def test_a_trainer_that_is_not_there_yet_is_waited_for(
    stack: ExitStack, short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found: list[FetchedBundle] = []
    thread = threading.Thread(target=lambda: found.append(fetch(ipc(short_dir))))
    thread.start()
    time.sleep(0.2)
    served(stack, short_dir, DATA)
    thread.join(60)
    assert [one.data for one in found] == [DATA]
    assert f"waiting for the trainer at ipc://{short_dir}/control.ipc" in caplog.text


def test_nobody_who_answers_ends_the_wait_with_its_code(short_dir: Path) -> None:
    with pytest.raises(
        NoAnswerError, match=r"no trainer has answered at ipc://.* for 0.1 s; compare the address"
    ) as caught:
        fetch(ipc(short_dir), 0.1)
    assert caught.value.exit_code == ExitCode.NO_ANSWER == 68


def test_a_bundle_that_changed_meanwhile_is_fetched_anew(stack: ExitStack, short_dir: Path) -> None:
    server = served(stack, short_dir, DATA)
    other = bundle_of(rewards="# another\n")
    server.next_offers.append(OfferedBundle(offer_of(other), other))
    assert fetch(ipc(short_dir)).data == other


def test_another_blob_endpoint_is_learned_from_the_trainer(stack: ExitStack, short_dir: Path) -> None:
    blobs = f"ipc://{short_dir}/elsewhere.ipc"
    offered = OfferedBundle(offer_of(DATA, blob_endpoint=blobs), DATA)
    stack.enter_context(BundleServer(f"ipc://{short_dir}/control.ipc", blobs, offered))
    assert fetch(ipc(short_dir)) == FetchedBundle(DATA, digest_of(DATA), blobs)


def test_a_trainer_that_names_an_endpoint_without_keys_is_refused(stack: ExitStack, short_dir: Path) -> None:
    served(stack, short_dir, DATA, blob_endpoint="tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="over TCP both need keys"):
        fetch(ipc(short_dir))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "0" * 64}, "another digest than the trainer named"),
        ({"num_bytes": LARGEST_BUNDLE_BYTES + 1}, f"{LARGEST_BUNDLE_BYTES} are allowed"),
    ],
)
def test_what_is_not_what_was_named_or_too_large_is_not_used(
    stack: ExitStack, short_dir: Path, changes: dict[str, object], reason: str
) -> None:
    server = served(stack, short_dir, DATA, **changes)
    with pytest.raises(BundleError, match=reason) as caught:
        fetch(ipc(short_dir))
    assert caught.value.exit_code == ExitCode.BUNDLE
    assert "num_bytes" not in changes or server.received == [BundleRequest()], "not a byte of it was asked for"


def test_a_trainer_without_a_bundle_says_why(stack: ExitStack, short_dir: Path) -> None:
    offered = OfferedBundle(Reject(["rewards.py is not valid Python"]))
    control = f"ipc://{short_dir}/control.ipc"
    stack.enter_context(BundleServer(control, f"{control}.blobs", offered))
    with pytest.raises(BundleError, match=r"gives this producer no bundle:\n  rewards.py is not valid Python"):
        fetch(ipc(short_dir))


# Over TCP, with keys.


@pytest.fixture
def tcp(stack: ExitStack, tmp_path: Path) -> str:
    make_keys(tmp_path, "gpu01")
    control, blobs = (f"tcp://127.0.0.1:{reserve_port(stack)}" for _ in range(2))
    port = blobs.rpartition(":")[2]
    offered = OfferedBundle(offer_of(DATA, blob_endpoint=f"tcp://0.0.0.0:{port}"), DATA)
    stack.enter_context(BundleServer(control, blobs, offered, keys=tmp_path / "trainer"))
    return control


def test_over_tcp_it_comes_to_who_has_a_key(tcp: str, tmp_path: Path) -> None:
    address = trainer_address(tcp, str(tmp_path / "gpu01"), ["transport.identity=gpu01"])
    fetched = fetch(address)
    assert fetched.data == DATA
    assert fetched.blob_endpoint.startswith("tcp://127.0.0.1:"), "where the trainer listens on every address"


def refused(address: TrainerAddress, once_it_says: str, caplog: pytest.LogCaptureFixture) -> NoAnswerError:
    """How a fetch ends whose patience ends when the log says why it waits."""
    patient, ended = BundleFetch("gpu01-1-aa", address, PATIENCE_S), list[NoAnswerError]()

    def run() -> None:
        with pytest.raises(NoAnswerError) as caught:
            patient.run()
        ended.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: once_it_says in caplog.text, once_it_says)
    patient.wait_s = 0.0
    thread.join(PATIENCE_S)
    [error] = ended
    return error


def test_a_key_that_nobody_authorized_is_named_in_the_end(
    tcp: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "other", "gpu01")
    stranger = tmp_path / "other" / "gpu01"
    (stranger / "trainer.public").write_bytes((tmp_path / "trainer" / "trainer.public").read_bytes())
    error = refused(
        trainer_address(tcp, str(stranger), ["transport.identity=gpu01"]), "does not know the key of", caplog
    )
    assert error.exit_code == ExitCode.NO_ANSWER
    assert f"no trainer has answered at {tcp} for 0 s: it does not know the key of gpu01 (" in str(error)
    assert "slipstream keys authorize gpu01" in str(error)


def test_a_trainer_with_another_key_than_expected_is_not_listened_to(
    tcp: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "other", "gpu01")
    address = trainer_address(tcp, str(tmp_path / "other" / "gpu01"), ["transport.identity=gpu01"])
    assert "it has another key than" in str(refused(address, "it has another key than", caplog))
