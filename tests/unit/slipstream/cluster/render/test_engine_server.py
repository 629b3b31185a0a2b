"""Producers that are clients of a server, in each form: no GPU, the files that they need, and a folder that servers see."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slipstream.cluster.render import shared_folder
from tests.unit.slipstream.cluster.render.rendered import KEYS, bash, calls, project, render, run_name, stand_in
from tests.unit.slipstream.cluster.render.test_lint import lint

SERVER = {
    "url": "https://gpu-host:8000",
    "adapter_dir": "/mnt/shared/adapters",
    "key_file": "server.key",
    "ca_file": "/etc/ca.pem",
}
SLURM = ("slurm", "--trainer-node", "n1")
SSH = ("ssh", "--trainer-node", "root@a", "--hosts", "root@b", "root@c", "--producers", "2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, on a machine that has a network disk at /mnt/shared."""
    monkeypatch.chdir(tmp_path)
    project(tmp_path, engine_server=SERVER)

    def mounted(place: Path) -> tuple[str, str]:
        return ("/mnt/shared", "nfs4") if place.is_relative_to("/mnt/shared") else ("/", "ext4")

    monkeypatch.setattr(shared_folder, "mount_of", mounted)
    return tmp_path


def written(here: Path, *arguments: str) -> Path:
    target, *others = arguments
    assert render(target, here / "out", *others) == 0
    assert lint("shellcheck", *(here / "out").glob("*.sh"), *(here / "out").glob("*.sbatch")) == ""
    return here / "out"


def test_a_job_of_slurm_asks_for_no_gpu_and_names_the_files(here: Path) -> None:
    out = written(here, *SLURM, "--gpus", "4", "--ranks", "2")
    assert "--gpus-per-node=2" in (out / "trainer.sbatch").read_text(), "the trainer has its own"
    assert "--gpus" not in (out / "producers.sbatch").read_text()
    programs = here / "bin"
    script = out / "producers.sbatch"
    script.write_text(script.read_text().replace("export PATH=", "# PATH="))
    stand_in(programs, "rl-producer", "exit 0")
    stand_in(programs, "squeue", "echo 7")
    done = bash(script, programs, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="4")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(programs)[0] == (
        f"rl-producer --gpu cpu --connect tcp://n1:5557 --keys {out}/keys --set engine_server.adapter_dir=/mnt/shared/adapters "
        f"--set engine_server.key_file={here}/server.key --set engine_server.ca_file=/etc/ca.pem "
        "--set transport.identity=producer-4"
    )


def test_a_pod_has_no_gpu_and_shares_a_volume_with_the_servers(here: Path) -> None:
    out = written(here, "kubernetes")
    claim, job = yaml.safe_load_all((out / "producers.yaml").read_text())
    for manifest in (claim, job):
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert "--gpu=cpu" in container["args"]
    assert "limits" not in container["resources"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    files = dict(arg.removeprefix("--set=").split("=") for arg in container["args"] if arg.startswith("--set="))
    shared = mounts[files["engine_server.adapter_dir"]]
    assert (shared.get("readOnly"), files["engine_server.adapter_dir"]) == (None, SERVER["adapter_dir"])
    assert volumes[shared["name"]]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    [credentials] = [one["value"] for one in container["env"] if one["name"] == "CREDENTIALS_DIRECTORY"]
    programs = here / "bin"
    stand_in(programs, "kubectl", '[ "$1" != get ] || exit 1; [ "$2" != --filename=- ] || cat >/dev/null')
    stand_in(programs, "rl-keys", KEYS)
    (out / "keys.sh").write_text((out / "keys.sh").read_text().replace("export PATH=", "# PATH="))
    assert bash(out / "apply.sh", programs).returncode == 0
    [handed] = [
        call.split()
        for call in calls(programs)
        if call.startswith(f"kubectl create secret generic {run_name(out)}-server")
    ]
    for key, source in (("key_file", f"{here}/server.key"), ("ca_file", "/etc/ca.pem")):
        mount = mounts[files[f"engine_server.{key}"]]
        assert files[f"engine_server.{key}"] == f"{credentials}/{key}", "where others are known to read nothing"
        assert volumes[mount["name"]]["secret"]["secretName"] == handed[4]
        assert f"--from-file={mount['subPath']}={source}" in handed
    assert "--gpu=0" in (out / "trainer.yaml").read_text(), "the trainer has its own"


def test_a_unit_may_write_to_the_shared_folder_and_gets_the_servers_key_as_a_credential(here: Path) -> None:
    out = written(here, *SSH)
    assert [line.split() for line in (out / "hosts").read_text().splitlines()[1:]] == [
        ["producer-0", "root@b", "cpu"],
        ["producer-1", "root@c", "cpu"],
    ]
    lines = (out / "producer.conf").read_text().splitlines()
    assert {"RequiresMountsFor=/mnt/shared/adapters", "ReadWritePaths=/mnt/shared/adapters", "UMask=0022"} <= set(lines)
    assert [line for line in lines if line.startswith("LoadCredential")] == [
        "LoadCredential=key_file:slipstream.key_file",
        "LoadCredential=ca_file:slipstream.ca_file",
    ]
    assert lines[-1].endswith(
        " --set engine_server.adapter_dir=/mnt/shared/adapters --set engine_server.key_file=${CREDENTIALS_DIRECTORY}/key_file "
        "--set engine_server.ca_file=${CREDENTIALS_DIRECTORY}/ca_file $RL_ARGS"
    )


def test_hosts_of_producers_get_the_servers_key_and_the_trainers_does_not(here: Path) -> None:
    (here / "server.key").write_text("opensesame\n")
    out = written(here, *SSH, "--set", "engine_server.ca_file=null")
    programs = here / "bin"
    stand_in(programs, "ssh", f'tar --list --file=- >"{here}/$1-$4"')
    stand_in(programs, "rl-keys", KEYS)
    (out / "keys.sh").write_text((out / "keys.sh").read_text().replace("export PATH=", "# PATH="))
    done = bash(out / "start.sh", programs)
    assert done.returncode == 0, done.stderr
    assert (out / "keys" / "key_file").read_text() == "opensesame\n"
    assert (out / "keys" / "key_file").stat().st_mode & 0o777 == 0o600
    brought = {file.name: file.read_text().split() for file in here.glob("root@*")}
    assert {name for name, files in brought.items() if "keys/key_file" in files} == {
        "root@b-producer-0",
        "root@c-producer-1",
    }
    assert len(brought) == 3


@pytest.mark.parametrize(
    ("arguments", "place", "reason"),
    [
        (
            SLURM,
            "/scratch/adapters",
            r"is on a local disk of this machine \(ext4, mounted at /\).*of a network file system",
        ),
        (
            SSH,
            "/scratch/adapters",
            r"is on a local disk of this machine \(ext4, mounted at /\).*of a network file system",
        ),
        (SSH, "/home/me/adapters", "a systemd unit has its own /home"),
        (SSH, "/var/tmp/adapters", "a systemd unit has its own /var/tmp"),
        (("kubernetes",), "/run/adapters", "a pod has its own /run"),
        (("kubernetes",), "/", "a pod has its own / "),
    ],
)
def test_a_folder_that_is_not_shared_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], place: str, reason: str
) -> None:
    target, *others = arguments
    out = Path("/mnt/shared/jobs") if target == "slurm" else here / "out"
    assert render(target, out, *others, "--set", f"engine_server.adapter_dir={place}") == 78
    error = capsys.readouterr().err
    assert f"{here}/run.yaml: engine_server.adapter_dir: {place}: " in error
    assert re.search(reason, error), error
    assert not out.exists()


def test_the_folder_of_the_jobs_is_seen_by_all_nodes_and_so_is_its_file_system(here: Path) -> None:
    written(here, *SLURM, "--set", "engine_server.adapter_dir=adapters")
    assert f"adapter_dir={here}/adapters" in (here / "out" / "producers.sbatch").read_text()


@pytest.mark.parametrize("arguments", [SLURM, SSH])
def test_a_server_on_each_producers_own_host_needs_no_shared_folder(here: Path, arguments: tuple[str, ...]) -> None:
    local = ("--set", "engine_server.url=http://127.0.0.1:8000", "--set", "engine_server.ca_file=null")
    target, *others = arguments
    assert render(target, here / "out", *others, *local, "--set", "engine_server.adapter_dir=/scratch/adapters") == 0
