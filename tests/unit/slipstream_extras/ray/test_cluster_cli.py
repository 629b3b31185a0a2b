"""The command line, and what is refused before anything starts."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import yaml

from protocol.config.loader import load_config
from protocol.errors import ConfigError, ExitCode, IncompatiblePeerError, NoResourcesError
from slipstream_extras.ray import asked as probe
from slipstream_extras.ray import cli, placing
from slipstream_extras.ray.asked import Asked, NodeFacts, plan_of
from slipstream_extras.ray.plan import Plan, namespace, on_host
from tests.unit.slipstream_extras.ray.builders import PLAN, plan

FACTS = NodeFacts("10.0.0.5", "", "ext4", None, False, 20_000)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    values = {
        "run_dir": "run",
        "model": {"path": "org/model"},
        "dataset": {"path": "train.jsonl"},
        "rewards": {"functions": [{"function": "exact_match"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def planned(file: Path, *arguments: str) -> Plan:
    with cli.up.make_context("up", ["--config", str(file), *arguments]) as context:
        asked = Asked(**context.params)
    return plan_of(asked, load_config(str(file), asked.overrides), file.parent / "run", FACTS)


def test_the_plan_of_a_plain_file(file: Path) -> None:
    found = planned(file)
    keys = file.parent / "run/cluster/keys"
    assert (found.producers, found.least, found.most, found.ranks, found.gpus, found.cpus) == (1, 0, 0, 1, 1, 1)
    assert found.overrides == [f"transport.keys={keys}", "transport.endpoint=tcp://10.0.0.5:20000"]
    assert (found.config, found.folder, found.model) == (str(file), str(file.parent), "")


def test_an_endpoint_with_keys_is_kept_and_another_one_is_not(file: Path) -> None:
    own = ["--set", "transport.keys=keys", "--set", "transport.endpoint=tcp://10.0.0.5:5557"]
    found = planned(file, *own)
    assert (found.endpoint, found.keys) == ("tcp://10.0.0.5:5557", str(file.parent / "keys"))
    assert found.overrides == own[1::2]
    found = planned(file, "--set", "transport.endpoint=ipc:///tmp/x")
    assert found.endpoint == "tcp://10.0.0.5:20000"


def test_a_model_that_is_a_folder_is_named_to_producers(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert planned(file, "--set", "model.path=model").model == str(tmp_path / "model")
    assert planned(file, "--set", "model.path=model", "--model", "/models/a").model == "/models/a"


def test_clients_of_a_server_take_no_gpu_and_have_its_files_at_the_same_place(file: Path, tmp_path: Path) -> None:
    server = ["--set", "engine_server.url=http://127.0.0.1:8000", "--set", "engine_server.adapter_dir=shared"]
    found = planned(file, *server, "--producer-set", "serve.port=1")
    assert found.producer_overrides == [f'engine_server.adapter_dir="{tmp_path}/shared"', "serve.port=1"]
    teachers = [
        "--set",
        "teachers=[{name: t, url: 'http://h:1', key_file: key}]",
        "--set",
        "distillation.mode=advantage",
    ]
    assert planned(file, *teachers).producer_overrides == [f'teachers.0.key_file="{tmp_path}/key"']
    assert found.trainer_needs["GPU"] == 1
    assert "GPU" not in found.producer_needs
    assert planned(file).producer_needs["GPU"] == 1


def test_the_number_of_producers_keeps_to_the_bounds(file: Path) -> None:
    bounds = ["--set", "producers.min=2", "--set", "producers.max=4"]
    assert (planned(file, *bounds).producers, planned(file, *bounds, "--producers", "4").producers) == (2, 4)
    with pytest.raises(
        ConfigError, match=r"--producers 5: the configuration has producers\.min=2 and producers\.max=4"
    ):
        planned(file, *bounds, "--producers", "5")
    with pytest.raises(ConfigError, match=r"min=5 is more than max=4"):
        load_config(str(file), ["producers.min=5", "producers.max=4"])


def test_no_room_is_said_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"10.0.0.5": {"CPU": 64.0, "GPU": 3.0} | dict.fromkeys(on_host("10.0.0.5"), 1.0)}
    monkeypatch.setattr(placing, "free_per_node", lambda: free)
    placing.wait_for_room(plan(producers=1), time.sleep)
    clock = iter(range(100))
    monkeypatch.setattr(placing, "time", SimpleNamespace(monotonic=lambda: 10.0 * next(clock)))
    with pytest.raises(
        NoResourcesError,
        match=r"nothing was started: a producer: needs 1 GPU and 4 CPU on one node\.",
    ):
        placing.wait_for_room(PLAN, lambda seconds: None)
    assert capsys.readouterr().out.count("waiting 20 s for room") == 1


def test_a_namespace_for_each_run() -> None:
    assert namespace("/runs/a") == namespace("/runs/../runs/a")
    assert namespace("/runs/a") != namespace("/other/a")
    assert namespace("/runs/a").startswith("slipstream-a-")


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
