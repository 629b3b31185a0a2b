"""The manifests: valid by Kubernetes' own schemas, and what they mean for exit codes, keys and files."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from protocol.channel.authenticator import AuthorizedKeys
from protocol.channel.keys import generate, producer_keys, trainer_keys, write_public
from protocol.config.loader import load_config
from protocol.errors import ExitCode
from protocol.runtime.supervisor import STAYS_DOWN
from tests.unit.deploy.scripts import KEYS, REPOSITORY, bash, calls, stand_in
from tests.unit.protocol.config.files import MINIMAL

FOLDER = REPOSITORY / "deploy" / "kubernetes"
RELEASES = ("1.33", "1.37")


def manifests() -> dict[str, dict[str, Any]]:
    """Return the resources by kind and name."""
    files = [file for file in sorted(FOLDER.glob("*.yaml")) if file.name != "kustomization.yaml"]
    documents = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in documents}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["template"]["spec"]


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    [found] = pod(manifest)["containers"]
    return found


@pytest.mark.long
def test_the_schemas_of_kubernetes_find_nothing() -> None:
    found = manifests()
    monitor = found.pop("PodMonitor slipstream")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert {rule["targetLabel"] for rule in endpoint["relabelings"]} == {"run_dir", "job"}, "`run` is the metrics' own"
    assert len(found) == 6
    for manifest in found.values():
        for release in RELEASES:
            kubernetes_validate.validate(manifest, release, strict=True)
    broken = found["Job slipstream-trainer"] | {"spec": {"backofLimit": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, RELEASES[0], strict=True)


def test_every_file_of_the_folder_is_named_in_the_kustomization() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    named = set(re.findall(r"^  (?:# )?- ([\w-]+\.yaml)", text, re.M))
    assert named == {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    values = yaml.safe_load(text)
    assert values["images"][0]["name"] == container(manifests()["Job slipstream-trainer"])["image"]


def test_pods_come_back_unless_a_new_start_cures_nothing() -> None:
    jobs = {name: one for name, one in manifests().items() if name.startswith("Job ")}
    assert len(jobs) == 3
    for name, job in jobs.items():
        stays, ignored = job["spec"]["podFailurePolicy"]["rules"]
        assert set(stays["onExitCodes"]["values"]) == STAYS_DOWN - {ExitCode.OK}
        assert stays["onExitCodes"]["containerName"] == container(job)["name"]
        assert stays["action"] == ("FailJob" if name.endswith("trainer") else "FailIndex")
        assert (ignored["action"], pod(job)["restartPolicy"]) == ("Ignore", "Never")


def start_script(job: dict[str, Any]) -> list[str]:
    shell, flag, script, name = container(job)["command"]
    assert (shell, flag, name) == ("/bin/bash", "-c", "start")
    return [shell, flag, script, name]


def test_a_pod_that_the_cluster_stopped_has_not_finished(tmp_path: Path) -> None:
    """A pod whose container ends with 0 counts as done for ever, also where it was evicted."""
    found = manifests()
    assert start_script(found["Job slipstream-trainer"]) == start_script(found["Job slipstream-producer"])
    start = start_script(found["Job slipstream-trainer"])
    for code in (0, 75, 78):
        assert subprocess.run([*start, "bash", "-c", f"exit {code}"], timeout=30).returncode == code
    for own, seen in ((0, 143), (78, 78)):
        (tmp_path / "up").unlink(missing_ok=True)
        drains = f"trap 'sleep 0.2; exit {own}' TERM; touch up; while :; do sleep 0.05; done"
        with subprocess.Popen([*start, "bash", "-c", drains], cwd=tmp_path) as process:
            while not (tmp_path / "up").exists():
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == seen
        (tmp_path / "up").unlink()


def test_a_pod_that_is_stopped_while_its_program_starts_stops_it(tmp_path: Path) -> None:
    at_its_start = "trap '[[ $BASH_COMMAND != *@* ]] || kill -TERM \"$$\"' DEBUG\n"
    (tmp_path / "early").write_text(at_its_start)
    start = [*start_script(manifests()["Job slipstream-trainer"]), "sleep", "600"]
    stopped = subprocess.run(start, env=os.environ | {"BASH_ENV": str(tmp_path / "early")}, timeout=30)
    assert stopped.returncode == 128 + signal.SIGTERM


def test_ports_and_folders_of_the_manifests_are_those_of_the_run(tmp_path: Path) -> None:
    found = manifests()
    trainer, producer = container(found["Job slipstream-trainer"]), container(found["Job slipstream-producer"])
    (tmp_path / "run.yaml").write_text(MINIMAL)
    overrides = [argument.removeprefix("--set=") for argument in trainer["args"] if argument.startswith("--set=")]
    assert set(overrides) == {
        each.removeprefix("--set=") for each in container(found["Job slipstream-ranks"])["args"]
    } & set(overrides)
    config = load_config(str(tmp_path / "run.yaml"), overrides)
    claim = next(each for each in trainer["volumeMounts"] if each["name"] == "state")
    assert config.run_dir == f"{claim['mountPath']}/run"
    ports = {each["name"]: each["port"] for each in found["Service slipstream-trainer"]["spec"]["ports"]}
    listening = {"control": config.control_endpoint, "adapters": config.blob_endpoint}
    assert {name: f"tcp://0.0.0.0:{ports[name]}" for name in listening} == listening
    assert ports["metrics"] == config.observability.trainer_metrics_port
    assert config.observability.metrics_host == "0.0.0.0"
    assert f"--connect=tcp://slipstream-trainer:{ports['control']}" in producer["args"]
    assert producer["ports"] == [{"name": "metrics", "containerPort": config.observability.producer_metrics_port}]


def mount(root: Path, files: dict[str, bytes], mode: int) -> Path:
    """A volume of a Secret as kubelet lays it out in a pod with an fsGroup: everybody may write to its root; the files are
    in a folder of the moment, to which links lead."""
    moment = root / "..2026_11_23"
    root.mkdir(parents=True)
    root.chmod(0o1777)
    for name, content in files.items():
        (moment / name).parent.mkdir(parents=True, exist_ok=True)
        (moment / name).write_bytes(content)
        (moment / name).chmod(mode | (mode & 0o400) >> 3)
    moment.chmod(0o2755)
    (root / "..data").symlink_to(moment.name)
    for name in {Path(name).parts[0] for name in files}:
        (root / name).symlink_to(f"..data/{name}")
    return root


def test_both_daemons_take_the_keys_as_a_pod_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, found = tmp_path, manifests()
    made = here / "keys"
    publics = {name: generate(made, name) for name in ("trainer", "producer-0", "producer-1")}
    for name in ("producer-0", "producer-1"):
        write_public(made / "authorized" / f"{name}.public", name, publics[name])
    secrets = {file.name: file.read_bytes() for file in made.glob("*.secret")}

    volumes = {each["name"]: each for each in pod(found["Job slipstream-trainer"])["volumes"]}
    assert volumes["secret"]["secret"] == {"secretName": "slipstream-trainer-key", "defaultMode": 0o400}
    credentials = mount(here / "credentials", {"trainer.secret": secrets["trainer.secret"]}, 0o400)
    authorized = {file.name: file.read_bytes() for file in made.glob("authorized/*")}
    mount(here / "authorized", authorized, 0o644)
    [prepare] = pod(found["Job slipstream-trainer"])["initContainers"]
    (here / "slipstream").mkdir()
    subprocess.run([word.replace("/run/", f"{here}/") for word in prepare["command"]], check=True, timeout=30)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    keys = trainer_keys(here / "slipstream" / "keys")
    assert keys.secret.public() == publics["trainer"]
    assert AuthorizedKeys(keys.authorized).identity(publics["producer-1"]) == "producer-1"

    volumes = {each["name"]: each for each in pod(found["Job slipstream-producer"])["volumes"]}
    [item] = volumes["trainer"]["secret"]["items"]
    trainer = mount(here / "trainer", {item["path"]: (made / item["key"]).read_bytes()}, 0o644)
    own = mount(here / "own", {"producer.secret": secrets["producer-1.secret"]}, 0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(own))
    mine = producer_keys(trainer / "keys", None)
    assert (mine.identity, mine.trainer) == ("producer-1", publics["trainer"])


def test_applying_hands_over_every_key_and_no_other(tmp_path: Path) -> None:
    programs, here = tmp_path / "bin", shutil.copytree(FOLDER, tmp_path / "kubernetes")
    producers = (here / "producers.yaml").read_text()
    (here / "producers.yaml").write_text(producers.replace("completions: 1", "completions: 3"))
    stand_in(programs, "kubectl", "")
    stand_in(programs, "slipstream", KEYS)
    done = bash(here / "apply.sh", programs)
    assert done.returncode == 0, done.stderr
    made = [call for call in calls(programs) if call.startswith("kubectl create secret")]
    handed = {call.split()[4]: re.findall(r"--from-file=keys/(\S+)", call) for call in made}
    names = [f"producer-{number}" for number in range(3)]
    assert handed == {
        "slipstream-trainer-key": ["trainer.secret"],
        "slipstream-authorized": [f"authorized/{each}.public" for each in names],
        "slipstream-producer-keys": ["trainer.public", *(f"{each}.secret" for each in names)],
    }
    assert all("--namespace=my-run" in call for call in made)
    assert calls(programs)[-1] == "kubectl apply --kustomize=."
