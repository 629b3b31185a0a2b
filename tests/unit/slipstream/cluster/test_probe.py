"""What a node must have before a trainer is started there."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from protocol.errors import ConfigError, ExitCode, IncompatiblePeerError
from slipstream.cluster import asked as probe
from slipstream.cluster.asked import NodeFacts


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: run\n")
    return str(file)


def facts(tmp_path: Path, config: str, **changes: object) -> NodeFacts:
    found = msgspec.json.decode(probe.look("10.0.0.5", str(tmp_path / "run"), config), type=NodeFacts)
    return msgspec.structs.replace(found, **changes)


def test_a_node_that_has_everything(tmp_path: Path, config: str) -> None:
    found = facts(tmp_path, config, file_system="ext4")
    assert not found.has_journal
    assert 20_000 <= found.port < 30_000
    probe.check(found, str(tmp_path / "run"), config)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "cifs", "fuse.sshfs", "fuse", "9p"])
def test_a_network_file_system_is_refused_with_the_way_out(tmp_path: Path, config: str, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"run_dir: /nfs/run is on a network file system \({kind}\).*--trainer-node.*--backup"
    ):
        probe.check(facts(tmp_path, config, file_system=kind), "/nfs/run", config)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuseblk", "unknown"])
def test_disks_are_none(kind: str) -> None:
    assert not probe.is_on_network(kind)


def test_the_file_system_is_that_of_the_deepest_mount_whether_the_folder_exists_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = {"/": "ext4", str(tmp_path / "net"): "nfs4", str(tmp_path / "net/local"): "xfs", "/ho": "tmpfs"}
    parts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    (tmp_path / "link").symlink_to(tmp_path / "net")
    expected = {"x": "ext4", "net/run": "nfs4", "network": "ext4", "net/local/run": "xfs", "link/run": "nfs4"}
    assert {place: probe.file_system(tmp_path / place) for place in expected} == expected


def test_a_configuration_that_is_not_there_or_another_one(tmp_path: Path, config: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file on the trainer's node 10\.0\.0\.5"):
        probe.check(facts(tmp_path, "/gone.yaml", file_system="ext4"), "run", config)
    there = facts(tmp_path, config, file_system="ext4")
    Path(config).write_text("run_dir: other\n")
    with pytest.raises(ConfigError, match="is another one"):
        probe.check(there, "run", config)


def test_a_run_that_is_here_and_not_there(tmp_path: Path, config: str) -> None:
    there = facts(tmp_path, config, file_system="ext4")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/journal.sqlite").touch()
    with pytest.raises(ConfigError, match=r"the trainer's node 10\.0\.0\.5 has not") as refused:
        probe.check(there, str(tmp_path / "run"), config)
    assert refused.value.exit_code == ExitCode.CONFIG
    probe.check(facts(tmp_path, config, file_system="ext4"), str(tmp_path / "run"), config)


def test_another_release(tmp_path: Path, config: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=r"has Slipstream 0\.0\.1"):
        probe.check(facts(tmp_path, config, release="0.0.1"), "run", config)
