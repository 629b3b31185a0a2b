"""The scripts of `rl-cluster render ssh`, run on three hosts that are folders: bubblewrap gives each an /etc of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.channel.authenticator import AuthorizedKeys
from protocol.channel.keys import producer_keys, trainer_keys
from tests.tools import require
from tests.unit.slipstream.cluster.render.rendered import project, run_name

from .test_systemd_units import make, systemd

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
SSH = """#!/bin/bash
# The command on a host, whose systemctl only takes notes.
host=$HOSTS/${1#root@}
shift
exec bwrap --ro-bind / / --dev /dev --proc /proc --bind "$host/etc" /etc --bind "$host/mnt" /mnt \\
  --ro-bind "$host/usr/local/lib" /usr/local/lib --setenv TMPDIR /mnt --chdir / bash -c "$*"
"""
SYSTEMCTL = '#!/bin/bash\necho "$@" >>/mnt/calls\n'


class Hosts:
    """The folder of each host, with the units installed but for one, and `ssh` to them."""

    def __init__(self, folder: Path) -> None:
        require("bwrap", "bubblewrap")
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        for name, text in (("ssh", SSH), ("systemctl", SYSTEMCTL)):
            (self.programs / name).write_text(text)
        for name, module in (("rl-keys", "slipstream.keys.cli"), ("rl-cluster", "slipstream.cluster.cli")):
            (self.programs / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
        for file in self.programs.iterdir():
            file.chmod(0o755)
        for name in ("trainer", "gpu1", "gpu2"):
            (folder / name / "mnt").mkdir(parents=True)
            done = make("install-systemd", folder / name, "/opt/slipstream")
            assert done.returncode == 0, done.stderr

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOSTS": str(self.folder),
            "PYTHONPATH": str(REPOSITORY),
        }
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)

    def calls(self, host: str) -> list[str]:
        file = self.folder / host / "mnt" / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def run(tmp_path: Path, hosts: Hosts) -> Path:
    """Rendered for a trainer and three producers on two hosts, one of them on two GPUs."""
    folder = tmp_path / "run"
    project(folder)
    arguments = (
        "--producers",
        "3",
        "--gpus",
        "2",
        "--trainer-node",
        "root@trainer",
        "--hosts",
        "root@gpu1",
        "root@gpu2",
    )
    done = hosts.run("rl-cluster", "render", "ssh", "--config", "run.yaml", "--out", "out", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ("keys.sh",):  # this Python's folder may have other commands
        file = folder / "out" / name
        file.write_text(file.read_text().replace("export PATH=", "# PATH="))
    return folder / "out"


def test_each_host_gets_its_unit_its_key_and_no_other(hosts: Hosts, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = hosts.run("./start.sh", cwd=run)
    assert done.returncode == 0, done.stderr
    assert f"on root@trainer: /opt/slipstream/bin/rl-status --run /var/lib/slipstream/{run_name(run)}" in done.stdout
    started = {
        host: [call.split()[-1] for call in hosts.calls(host) if "restart" in call]
        for host in ("trainer", "gpu1", "gpu2")
    }
    first, second = r"rl-producer@0\x2c1.service", r"rl-producer@2\x2c3.service"
    assert started == {"trainer": ["rl-trainer.service"], "gpu1": [first, second], "gpu2": [first]}

    keys = hosts.folder / "trainer" / "etc" / "slipstream" / "keys"
    store = hosts.folder / "trainer" / "etc" / "credstore"
    assert [file.name for file in store.iterdir()] == ["slipstream.trainer"]
    with_credential(monkeypatch, store / "slipstream.trainer", "trainer.secret")
    trainer = trainer_keys(keys)
    authorized = AuthorizedKeys(trainer.authorized)
    found = {}
    for host in ("gpu1", "gpu2"):
        etc = hosts.folder / host / "etc"
        assert not list((etc / "slipstream" / "keys").glob("*.secret"))
        assert (etc / "credstore").stat().st_mode & 0o777 == 0o700
        for secret in sorted((etc / "credstore").iterdir()):
            assert secret.stat().st_mode & 0o777 == 0o600
            with_credential(monkeypatch, secret, "producer.secret")
            own = producer_keys(etc / "slipstream" / "keys", None)
            assert own.trainer == trainer.secret.public()
            assert authorized.identity(own.secret.public()) == own.identity
            found[f"{host} {secret.name}"] = own.identity
    assert found == {
        r"gpu1 slipstream.producer-0\x2c1": "producer-0",
        r"gpu2 slipstream.producer-0\x2c1": "producer-1",
        r"gpu1 slipstream.producer-2\x2c3": "producer-2",
    }
    for host in ("trainer", "gpu1", "gpu2"):
        assert [file.name for file in (hosts.folder / host / "mnt").iterdir()] == ["calls"], (
            "no copy of a secret is left"
        )


def test_a_producer_that_was_revoked_is_not_authorized_after_the_next_start(hosts: Hosts, run: Path) -> None:
    assert hosts.run("./start.sh", cwd=run).returncode == 0
    authorized = hosts.folder / "trainer" / "etc" / "slipstream" / "keys" / "authorized"
    shutil.copy(authorized / "producer-0.public", authorized / "elsewhere.public")
    done = hosts.run("rl-keys", "--keys", "keys", "revoke", "producer-1", cwd=run)
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        assert hosts.run("./start.sh", cwd=run).returncode == 0
        names = {file.stem for file in authorized.iterdir()}
        assert names == {"producer-0", "producer-2", "elsewhere"}, "keys that start.sh did not bring stay"


def with_credential(monkeypatch: pytest.MonkeyPatch, secret: Path, name: str) -> None:
    """As systemd hands it to the unit."""
    folder = secret.parents[1] / "credentials" / secret.name
    folder.mkdir(parents=True)
    shutil.copy(secret, folder / name)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))


def test_the_trainers_host_gets_the_run_and_systemd_takes_the_units(hosts: Hosts, run: Path) -> None:
    for _ in range(2):  # again: it starts anew
        done = hosts.run("./start.sh", cwd=run)
        assert done.returncode == 0, done.stderr
    place = hosts.folder / "trainer" / "etc" / "slipstream" / run_name(run)
    assert {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()} == {
        "run.yaml",
        "tasks/sums.py",
        "helpers.py",
    }
    for host, unit in (("trainer", "rl-trainer.service"), ("gpu1", "rl-producer@0.service")):
        units = hosts.folder / host / "usr" / "local" / "lib" / "systemd" / "system"
        template = unit.replace("@0", "@")
        dropin = hosts.folder / host / "etc" / "systemd" / "system" / f"{template}.d" / "20-cluster.conf"
        text = dropin.read_text().replace("/opt/slipstream/bin/", f"{hosts.programs}/")
        shutil.copy(hosts.programs / "rl-keys", hosts.programs / template.partition(".")[0].rstrip("@"))
        (units / f"{template}.d" / "20-cluster.conf").write_text(text)
        assert systemd("systemd-analyze", "verify", f"./{unit}", cwd=units) == ""


def test_stopping_ends_the_trainer_first(hosts: Hosts, run: Path) -> None:
    done = hosts.run("./stop.sh", cwd=run)
    assert done.returncode == 0, done.stderr
    assert hosts.calls("trainer") == ["disable --now rl-trainer.service"]
    assert hosts.calls("gpu1") == [f"disable --now rl-producer@{gpus}.service" for gpus in (r"0\x2c1", r"2\x2c3")]


def test_a_host_without_units_is_named_with_the_fix(hosts: Hosts, run: Path) -> None:
    (hosts.folder / "gpu2" / "usr/local/lib/systemd/system/rl-producer@.service").unlink()
    done = hosts.run("./start.sh", cwd=run)
    assert done.returncode == 78
    assert (
        "rl-producer@.service is not installed; in a checkout of Slipstream: make install-systemd PREFIX=/opt/slipstream"
        in done.stderr
    )
