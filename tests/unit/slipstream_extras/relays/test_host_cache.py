"""One producer of a host downloads, the others read, and whatever goes wrong costs a download."""

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.runtime import scratch as shared_memory
from slipstream_extras.relays.host_cache import Claim, HostCache, host_cache

A, B = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def cache() -> Iterator[HostCache]:
    with host_cache("tcp://10.0.0.5:5557") as made:
        yield made


def store(cache: HostCache, digest: str, blob: bytes) -> None:
    claim = cache.claim(digest)
    assert claim is not None
    put(claim, blob)
    claim.release()


def put(claim: Claim, blob: bytes) -> None:
    claim.room(len(blob))[:] = blob
    claim.share()


def test_one_downloads_says_how_far_it_is_and_the_others_read(cache: HostCache) -> None:
    claim = cache.claim(A)
    assert claim is not None
    assert cache.claim(A) is None
    assert cache.progress(A) == (0, 1)
    claim.note(1024)
    claim.note(1024)
    assert (cache.progress(A), cache.progress(B)) == ((1024, 3), (0, 0))
    assert (cache.has(A), cache.read(A, 4), cache.chunk(A, 0, 2)) == (False, None, b"")
    put(claim, b"blob")
    claim.release()
    claim.release()
    assert (cache.has(A), cache.read(A, 4), cache.read(A, 5)) == (True, b"blob", None)
    assert [cache.chunk(A, *part) for part in ((0, 2), (2, 8), (4, 1))] == [b"bl", b"ob", b""]
    cache.drop(A)
    assert not cache.has(A)


def test_a_right_that_is_given_back_or_whose_process_died_goes_to_another(cache: HostCache) -> None:
    claim = cache.claim(A)
    assert claim is not None
    claim.note(5)
    claim.release()
    again = cache.claim(A)
    assert again is not None
    assert cache.progress(A) == (0, 1)
    again.release()
    holder = (
        "import sys, time; from pathlib import Path; from slipstream_extras.relays.host_cache import HostCache\n"
        f"claim = HostCache(Path({str(cache.folder)!r})).claim({B!r}); claim.note(7); print('held', flush=True)\n"
        "(claim.cache.folder / f'.{claim.digest}.partial').write_bytes(b'half')\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert (cache.claim(B), cache.progress(B)) == (None, (7, 2))
        process.kill()
        process.wait()
    store(cache, B, b"blob")
    assert cache.read(B, 4) == b"blob"


def test_old_policies_go_and_what_the_killed_left_of_them(cache: HostCache) -> None:
    assert cache.folder is not None
    (cache.folder / f".{'9' * 64}.partial").write_bytes(b"left")
    waits = cache.claim("8" * 64)
    for number in range(5):
        store(cache, str(number) * 64, b"blob")
        os.utime(cache.folder / (str(number) * 64), ns=(number, number))
    store(cache, A, b"newest")
    kept = {"2" * 64, "3" * 64, "4" * 64, A}
    assert {name for name in os.listdir(cache.folder) if len(name) == 64} == kept
    locks = {f"{digest}.lock" for digest in (*kept, "8" * 64)}
    assert set(os.listdir(cache.folder)) == kept | locks, "what is being downloaded stays"
    assert waits is not None
    waits.release()


def test_what_newer_policies_build_on_stays_however_many_they_are(cache: HostCache) -> None:
    store(cache, A, b"anchor")
    for number in range(6):
        cache.keep(A)
        store(cache, str(number) * 64, b"blob")
    assert (cache.has(A), cache.has("2" * 64)) == (True, False)
    cache.keep(B)  # which is not here
    assert not cache.has(B)


def test_a_file_that_another_process_removes_meanwhile_is_no_error(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [*names(folder), B])
    store(cache, A, b"blob")
    assert cache.read(A, 4) == b"blob"
    assert caplog.text == ""


def test_a_full_memory_tells_the_others_not_to_wait(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    claim = cache.claim(A)
    assert claim is not None
    put(claim, b"blob")
    assert (cache.has(A), cache.progress(A)) == (False, None)
    claim.release()
    assert cache.folder is not None
    assert os.listdir(cache.folder) == [f"{A}.lock"]


def test_the_bytes_of_a_policy_are_kept_once_in_the_file_that_others_read(cache: HostCache) -> None:
    claim = cache.claim(A)
    assert claim is not None
    assert cache.folder is not None
    room = claim.room(4)
    assert isinstance(room.obj, mmap.mmap)
    room[:] = b"blob"
    partial = cache.folder / f".{A}.partial"
    assert (cache.has(A), partial.read_bytes()) == (False, b"blob"), "the memory is that of the file"
    claim.share()
    claim.release()
    assert not partial.exists()
    room[:1] = b"B"
    assert cache.read(A, 4) == b"Blob", "no copy was made"


def test_what_did_not_arrive_or_was_wrong_leaves_nothing(cache: HostCache) -> None:
    claim = cache.claim(A)
    assert claim is not None
    assert cache.folder is not None
    claim.room(4)[:] = b"blob"
    claim.release()
    assert os.listdir(cache.folder) == [f"{A}.lock"]
    store(cache, A, b"blob")
    assert cache.read(A, 4) == b"blob"


def test_producers_of_a_run_share_a_folder_which_the_last_one_removes(root: Path) -> None:
    with host_cache("run") as first:
        with host_cache("run") as second, host_cache("another") as other:
            assert first.folder == second.folder != other.folder
        store(first, A, b"blob")
        assert second.read(A, 4) == b"blob"
    assert os.listdir(root) == []


def test_without_a_folder_everybody_downloads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ROOT", root / "no such folder")
    with host_cache("run") as cache:
        assert cache.folder is None
        claims = [cache.claim(A), cache.claim(A)]
        for claim in claims:
            assert claim is not None
            claim.note(1)
            put(claim, b"blob")
            claim.release()
        assert not cache.has_room(1)
        assert (cache.has(A), cache.read(A, 4), cache.chunk(A, 0, 1), cache.progress(A)) == (False, None, b"", (0, 0))
        cache.drop(A)


def test_a_folder_of_another_mode_is_not_used(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with host_cache("run") as cache:
        assert cache.folder is not None
        cache.folder.chmod(0o755)
        with host_cache("run") as refused:
            assert refused.folder is None
    assert "not this user's alone" in caplog.text


def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.folder is not None
    path, lock = cache.folder / f"{A}.lock", fcntl.flock
    removed: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(descriptor)
            path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    claim = cache.claim(A)
    assert claim is not None
    assert cache.claim(A) is None
    claim.release()
