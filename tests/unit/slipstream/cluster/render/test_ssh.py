"""Where producers are put, and what the units run."""

import shlex
from pathlib import Path

import pytest

from protocol.config.loader import load_config
from protocol.errors import ConfigError
from slipstream.cluster.render.deployment import Size
from slipstream.cluster.render.ssh import places
from tests.unit.slipstream.cluster.render.rendered import project, render, run_name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    return tmp_path


def test_producers_are_dealt_out_to_the_hosts() -> None:
    found = places(Size(num_producers=5, num_gpus=2), ["a", "b"])
    assert [(each.host, each.gpus) for each in found] == [
        ("a", "0,1"),
        ("b", "0,1"),
        ("a", "2,3"),
        ("b", "2,3"),
        ("a", "4,5"),
    ]
    assert [each.name for each in found] == [f"producer-{number}" for number in range(5)]
    assert [each.gpus for each in places(Size(num_producers=2, num_gpus=0), ["a", "b"])] == ["cpu", "cpu"]


def test_two_producers_without_gpus_are_not_one_unit() -> None:
    with pytest.raises(ConfigError, match="--producers 3: without GPUs each of the 2 hosts has one"):
        places(Size(num_producers=3, num_gpus=0), ["a", "b"])


def test_the_units_run_what_a_person_would_type(here: Path) -> None:
    name = "trainer.run_name=100% \"of\" $HOME 'it'"
    assert (
        render("ssh", here / "out", "--trainer-node", "gpu01", "--hosts", "root@gpu02", "--ranks", "2", "--set", name)
        == 0
    )
    *_, trainer = (here / "out" / "trainer.conf").read_text().splitlines()
    words = shlex.split(trainer.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$"))
    assert words[:7] == ["/opt/slipstream/bin/rl-trainer", "--resume", "--gpu", "0,1", "--config", "run.yaml", "--set"]
    overrides = words[7:-1:2]
    assert (overrides[0], words[-1]) == (name, "$RL_ARGS")
    config = load_config("run.yaml", overrides)
    assert (config.run_dir, config.transport.keys) == (
        f"/var/lib/slipstream/{run_name(here / 'out')}",
        "/etc/slipstream/keys",
    )
    assert config.control_endpoint == "tcp://0.0.0.0:5557"
    *_, producer = (here / "out" / "producer.conf").read_text().splitlines()
    assert producer == (
        "ExecStart=/opt/slipstream/bin/rl-producer --gpu %I --connect tcp://gpu01:5557 --keys /etc/slipstream/keys $RL_ARGS"
    )


def test_producers_without_hosts_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render("ssh", here / "out", "--trainer-node", "a") == 78
    assert "Name each host with --hosts" in capsys.readouterr().err


def test_a_trainer_on_several_nodes_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render("ssh", here / "out", "--trainer-node", "a", "--hosts", "b", "--nodes", "2") == 78
    assert "these files have one node for the trainer" in capsys.readouterr().err
    assert not (here / "out").exists()
