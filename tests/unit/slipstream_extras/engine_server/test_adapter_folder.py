"""Who lives in the folder through which policies reach servers, and what is left of those that do not."""

import os
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from protocol.errors import ConfigError
from slipstream_extras.engine_server import folder as adapter_folder
from slipstream_extras.engine_server.folder import SILENT_S, client_folder

KILLED = """
import os, sys
from slipstream_extras.engine_server.folder import client_folder
with client_folder(sys.argv[1], None) as folder:
    print(folder.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def killed(tmp_path: Path) -> str:
    """The name of a client that was killed; while it lived nobody took it for dead."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    with client_folder(str(tmp_path), None) as other:
        assert other.dead_clients() == []
    process.kill()
    process.communicate()
    return name


def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_an_adapter_is_there_under_the_path_of_the_server_and_goes(tmp_path: Path) -> None:
    with client_folder(str(tmp_path / "shared"), "/mnt/adapters") as folder:
        folder.put("v1", source(tmp_path))
        folder.put("v1", tmp_path / "nothing is read twice")
        assert folder.server_path("v1") == f"/mnt/adapters/{folder.name}/v1"
        assert [file.name for file in (folder.path / "v1").iterdir()] == ["adapter_config.json"]
        assert folder.owner_of(folder.server_path("v1")) == folder.name
        folder.remove("v1")
        assert {entry.name for entry in folder.path.iterdir()} == {"alive"}
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    "path", ["/mnt/adapters/v1", "/mnt/adapters/mine/v1", "/other/slipstream-1/v1", "", "org/lora"]
)
def test_adapters_of_others_have_no_owner_here(tmp_path: Path, path: str) -> None:
    with client_folder(str(tmp_path), "/mnt/adapters") as folder:
        assert folder.owner_of(path) is None


def test_what_a_killed_client_left_is_found_at_once_and_can_be_removed(tmp_path: Path, killed: str) -> None:
    (tmp_path / "something-else").mkdir()
    with client_folder(str(tmp_path), None) as folder:
        assert folder.dead_clients() == [killed]
        assert not folder.is_dead(folder.name)
        folder.remove_client(killed)
        assert folder.is_dead(killed), "a server may still name it"
        assert folder.dead_clients() == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["something-else"]


def test_what_a_thread_does_after_the_end_leaves_nothing(tmp_path: Path) -> None:
    with client_folder(str(tmp_path / "shared"), None) as folder:
        pass
    folder.beat()
    folder.put("v1", source(tmp_path))
    assert list((tmp_path / "shared").iterdir()) == []


def test_one_that_is_just_joining_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = os.write, list[list[str]]()

    def look(descriptor: int, content: bytes) -> int:
        written = write(descriptor, content)
        seen.append(other.dead_clients())
        return written

    with client_folder(str(tmp_path), None) as other:
        monkeypatch.setattr(os, "write", look)
        with client_folder(str(tmp_path), None):
            assert seen == [[]]


def test_a_client_of_another_host_is_dead_when_it_has_been_silent(
    tmp_path: Path, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may not be seen from here."""
    monkeypatch.setattr(adapter_folder, "_boot_id", lambda: b"another")
    alive, now = tmp_path / killed / "alive", time.time()
    with client_folder(str(tmp_path), None) as folder:
        folder.beat()
        assert folder.dead_clients() == []
        os.utime(alive, (now - SILENT_S - 10,) * 2)
        assert folder.dead_clients() == [killed]
        alive.unlink()
        assert folder.dead_clients() == [], "its folder was changed just now"
        os.utime(tmp_path / killed, (now - SILENT_S - 10,) * 2)
        assert folder.dead_clients() == [killed]


def test_a_folder_that_cannot_be_made_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"engine_server.adapter_dir: .*/file cannot be written: (Not a dir|File ex)"),
        client_folder(str(tmp_path / "file"), None),
    ):
        pass


def test_paths_of_the_server_are_posix_whatever_this_host_has(tmp_path: Path) -> None:
    with client_folder(str(tmp_path), None) as folder:
        assert PurePosixPath(folder.server_path("v1")).parent == PurePosixPath(folder.path)
