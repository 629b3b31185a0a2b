"""The units as `make install-systemd` writes them, judged by systemd's own tools."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from protocol.config.loader import load_config
from protocol.errors import ExitCode
from tests.tools import require

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "deploy" / "systemd"
SERVICES = ("rl-trainer.service", "rl-producer@0.service")


def systemd(tool: str, *arguments: str, cwd: Path) -> str:
    """Everything that the tool said."""
    require(tool, "systemd")
    command = [tool, *arguments]
    return subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True
    ).stdout


def make(target: str, destination: Path, prefix: Path | str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", target, f"DESTDIR={destination}", f"PREFIX={prefix}"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "bin").mkdir()
    for name in ("rl-trainer", "rl-producer"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("root")
    done = make("install-systemd", folder, prefix)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def units(root: Path) -> Path:
    return root / "usr/local/lib/systemd/system"


def test_systemd_has_nothing_to_say_against_the_units(units: Path) -> None:
    assert (
        systemd("systemd-analyze", "verify", *(f"./{u}" for u in (*SERVICES, "rl.target", "rl.slice")), cwd=units) == ""
    )


@pytest.mark.parametrize("service", [*SERVICES, "rl-producer@cpu.service"])
def test_the_services_are_hardened(units: Path, service: str) -> None:
    report = systemd("systemd-analyze", "security", "--offline=true", "--no-pager", f"./{service}", cwd=units)
    overall = re.search(r"Overall exposure level for \S+: ([\d.]+)", report)
    assert overall, report
    assert float(overall[1]) <= 2.5


def test_the_units_run_the_virtual_environment_in_prefix(units: Path, prefix: Path) -> None:
    trainer, producer = ((units / name).read_text() for name in ("rl-trainer.service", "rl-producer@.service"))
    assert f"ExecStart={prefix}/bin/rl-trainer --resume --gpu ${{RL_GPU}} --config ${{RL_CONFIG}} $RL_ARGS\n" in trainer
    assert f"ExecStart={prefix}/bin/rl-producer --gpu %I --config ${{RL_CONFIG}} $RL_ARGS\n" in producer
    assert not [file for file in units.rglob("*") if file.is_file() and "@PREFIX@" in file.read_text()]


def test_user_and_folders_are_made_with_the_rights_they_need(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    systemd("systemd-sysusers", f"--root={tmp_path}", cwd=tmp_path)
    assert re.search(r"^slipstream:.*:/var/lib/slipstream:\S+/nologin$", (tmp_path / "etc/passwd").read_text(), re.M)
    if os.geteuid() == 0:  # giving folders to another user takes that
        systemd("systemd-tmpfiles", f"--root={tmp_path}", "--create", "slipstream.conf", cwd=tmp_path)
        modes = {
            name: (tmp_path / name).stat().st_mode & 0o777 for name in ("etc/slipstream/keys", "var/lib/slipstream")
        }
        assert modes == {"etc/slipstream/keys": 0o755, "var/lib/slipstream": 0o750}


def test_what_the_user_wrote_survives_an_upgrade_and_an_uninstall(tmp_path: Path, prefix: Path) -> None:
    mine = tmp_path / "etc/slipstream/trainer.env"
    make("install-systemd", tmp_path, prefix)
    assert mine.stat().st_mode & 0o777 == 0o600
    mine.write_text("RL_GPU=3\n")
    (tmp_path / "etc/slipstream/run.yaml").write_text("mine")
    make("install-systemd", tmp_path, prefix)
    done = make("uninstall-systemd", tmp_path, prefix)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == {f"etc/slipstream/{name}" for name in ("trainer.env", "producer.env", "run.yaml")}
    assert mine.read_text() == "RL_GPU=3\n"
    assert "Left: /etc/slipstream, /var/lib/slipstream" in done.stdout


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("/root/venv", "the units cannot see /home and /root; use /opt/slipstream"),
        ("venv", "expected an absolute path"),
        ("/opt/50%", "letters, digits and /._+- only"),
    ],
)
def test_a_prefix_that_cannot_work_is_refused(tmp_path: Path, prefix: str, reason: str) -> None:
    done = make("install-systemd", tmp_path, prefix)
    assert done.returncode != 0
    assert f"PREFIX={prefix}: {reason}" in done.stderr
    assert not files(tmp_path)


def test_every_exit_code_is_judged_once() -> None:
    common = (SOURCES / "common.conf").read_text()
    judged = re.findall(r"^# +(\d+) ([A-Z_]+) +(yes|no) ", common, re.M)
    others = {
        ExitCode.OK,
        ExitCode.INTERRUPTED,
        ExitCode.NO_RESOURCES,
    }  # two are no failures, one is of slipstream cluster alone
    assert [(int(code), name) for code, name, _ in judged] == [(int(c), c.name) for c in ExitCode if c not in others]
    prevented = " ".join(code for code, _, restarts in judged if restarts == "no")
    assert f"RestartPreventExitStatus={prevented}\n" in common
    assert f"SuccessExitStatus={ExitCode.INTERRUPTED:d}\n" in common


def test_the_example_run_is_the_gsm8k_example_at_home_in_the_units_folders() -> None:
    file = SOURCES / "config" / "run.example.yaml"
    config = load_config(str(file))
    assert config.control_endpoint == "ipc:///var/lib/slipstream/run/control.ipc"
    assert (config.observability.trainer_metrics_port, config.observability.producer_metrics_port) == (9464, 9465)
    text = (REPOSITORY / "examples/gsm8k/run.yaml").read_text().replace("task.py:", "/etc/slipstream/task.py:")
    expected = yaml.safe_load(text) | {"folder": "/var/lib/slipstream", "run_dir": "/var/lib/slipstream/run"}
    example = yaml.safe_load(file.read_text())
    del example["observability"]
    assert example == expected


@pytest.mark.parametrize("role", ["trainer", "producer"])
def test_the_environment_files_name_every_variable_of_the_unit_and_set_none(role: str) -> None:
    (unit,) = SOURCES.glob(f"rl-{role}*.service")
    lines = (SOURCES / "config" / f"{role}.env").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    offered = {line.removeprefix("#").partition("=")[0] for line in lines}
    assert set(re.findall(r"^Environment=(\w+)", unit.read_text(), re.M)) <= offered
