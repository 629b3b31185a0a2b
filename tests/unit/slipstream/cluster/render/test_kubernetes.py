"""The manifests: valid by Kubernetes' own schemas, and what they mean for exit codes, keys and files."""

import re
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
from slipstream.cluster.fleet.exits import STAYS_DOWN
from tests.unit.slipstream.cluster.render.rendered import KEYS, bash, calls, project, render, run_name, stand_in

RELEASES = ("1.33", "1.37")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    return tmp_path


def manifests(here: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """By kind and name, the run's being rl-my-run."""
    assert render("kubernetes", here / "out", *arguments) == 0
    files = [file.read_text().replace(run_name(here / "out"), "rl-my-run") for file in sorted(here.glob("out/*.yaml"))]
    documents = [one for text in files for one in yaml.safe_load_all(text)]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in documents}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["template"]["spec"]


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    [found] = pod(manifest)["containers"]
    return found


@pytest.mark.parametrize(
    "arguments", [(), ("--nodes", "3", "--ranks", "2"), ("--gpus", "0", "--ranks", "2", "--nodes", "2")]
)
def test_the_schemas_of_kubernetes_have_nothing_to_say(here: Path, arguments: tuple[str, ...]) -> None:
    found = manifests(here, *arguments)
    monitor = found.pop("PodMonitor rl-my-run")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert {rule["targetLabel"] for rule in endpoint["relabelings"]} == {"run_dir", "job"}, "`run` is the metrics' own"
    assert len(found) == (7 if "--nodes" in arguments else 6)
    for manifest in found.values():
        for release in RELEASES:
            kubernetes_validate.validate(manifest, release, strict=True)
    broken = found["Job rl-my-run-trainer"] | {"spec": {"backofLimit": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, RELEASES[0], strict=True)


def test_pods_come_back_unless_a_new_start_cures_nothing(here: Path) -> None:
    found = manifests(here, "--nodes", "2")
    jobs = {name: one for name, one in found.items() if name.startswith("Job ")}
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


def test_who_was_stopped_by_the_cluster_has_not_finished(here: Path) -> None:
    """A pod whose container ends with 0 counts as done for ever, also where it was evicted."""
    found = manifests(here)
    assert start_script(found["Job rl-my-run-trainer"]) == start_script(found["Job rl-my-run-producer"])
    start = start_script(found["Job rl-my-run-trainer"])
    for code in (0, 75, 78):
        assert subprocess.run([*start, "bash", "-c", f"exit {code}"], timeout=30).returncode == code
    for own, seen in ((0, 143), (78, 78)):
        (here / "up").unlink(missing_ok=True)
        drains = f"trap 'sleep 0.2; exit {own}' TERM; touch up; while :; do sleep 0.05; done"
        with subprocess.Popen([*start, "bash", "-c", drains], cwd=here) as process:
            while not (here / "up").exists():
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == seen
        (here / "up").unlink()


def test_the_run_reads_its_files_where_it_expects_them(here: Path) -> None:
    found = manifests(here)
    data = found["ConfigMap rl-my-run-run"]["data"]
    trainer = container(found["Job rl-my-run-trainer"])
    mounted = {each["mountPath"]: data[each["subPath"]] for each in trainer["volumeMounts"] if each["name"] == "run"}
    files = ("run.yaml", "tasks/sums.py", "helpers.py")
    assert mounted == {f"/workspace/{name}": (here / name).read_text() for name in files}
    assert (trainer["workingDir"], trainer["args"][:3]) == (
        "/workspace",
        ["rl-trainer", "--resume", "--config=run.yaml"],
    )
    overrides = [argument.removeprefix("--set=") for argument in trainer["args"] if argument.startswith("--set=")]
    config = load_config(str(here / "run.yaml"), overrides)
    claim = next(each for each in trainer["volumeMounts"] if each["name"] == "state")
    assert config.run_dir == f"{claim['mountPath']}/run"
    ports = {each["name"]: each["port"] for each in found["Service rl-my-run-trainer"]["spec"]["ports"]}
    listening = {"control": config.control_endpoint, "adapters": config.blob_endpoint}
    assert {name: f"tcp://0.0.0.0:{ports[name]}" for name in listening} == listening
    assert ports["metrics"] == config.observability.trainer_metrics_port
    assert config.observability.metrics_host == "0.0.0.0"
    producer = container(found["Job rl-my-run-producer"])
    assert f"--connect=tcp://rl-my-run-trainer:{ports['control']}" in producer["args"]
    assert producer["ports"] == [{"name": "metrics", "containerPort": config.observability.producer_metrics_port}]


def test_what_the_image_must_have_is_said(here: Path) -> None:
    (here / "model").mkdir()
    text = (
        (here / "run.yaml")
        .read_text()
        .replace("Qwen/Qwen2.5-0.5B-Instruct", "model")
        .replace("openai/gsm8k", "rows.jsonl")
    )
    (here / "run.yaml").write_text(text)
    (here / "rows.jsonl").write_text("")
    producer = container(manifests(here)["Job rl-my-run-producer"])
    notes = re.findall(r"^# (\S+ is .*)$", (here / "out" / "trainer.yaml").read_text(), re.M)
    assert notes == [
        f"{key} is {here}/{name} of this machine: put that into the image, or on a volume."
        for key, name in (("dataset.path", "rows.jsonl"), ("model.path", "model"))
    ]
    assert f"--model={here}/model" in producer["args"]


def test_a_file_that_no_config_map_holds_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "helpers.py").write_text("#" * 900_000)
    assert render("kubernetes", here / "out") == 78
    assert "put them into the image" in capsys.readouterr().err


def test_a_function_that_only_this_machine_has_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (here / "run.yaml").read_text().replace("tasks/sums.py:right", f"{here}/tasks/sums.py:right")
    (here / "run.yaml").write_text(text)
    assert render("kubernetes", here / "out") == 78
    assert f"name the file relative to {here}" in capsys.readouterr().err


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


def test_both_daemons_take_the_keys_as_a_pod_has_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = manifests(here), here / "keys"
    publics = {name: generate(made, name) for name in ("trainer", "producer-0", "producer-1")}
    for name in ("producer-0", "producer-1"):
        write_public(made / "authorized" / f"{name}.public", name, publics[name])
    secrets = {file.name: file.read_bytes() for file in made.glob("*.secret")}

    volumes = {each["name"]: each for each in pod(found["Job rl-my-run-trainer"])["volumes"]}
    assert volumes["secret"]["secret"] == {"secretName": "rl-my-run-trainer-key", "defaultMode": 0o400}
    credentials = mount(here / "credentials", {"trainer.secret": secrets["trainer.secret"]}, 0o400)
    authorized = {file.name: file.read_bytes() for file in made.glob("authorized/*")}
    mount(here / "authorized", authorized, 0o644)
    [prepare] = pod(found["Job rl-my-run-trainer"])["initContainers"]
    (here / "slipstream").mkdir()
    subprocess.run([word.replace("/run/", f"{here}/") for word in prepare["command"]], check=True, timeout=30)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    keys = trainer_keys(here / "slipstream" / "keys")
    assert keys.secret.public() == publics["trainer"]
    assert AuthorizedKeys(keys.authorized).identity(publics["producer-1"]) == "producer-1"

    volumes = {each["name"]: each for each in pod(found["Job rl-my-run-producer"])["volumes"]}
    [item] = volumes["trainer"]["secret"]["items"]
    trainer = mount(here / "trainer", {item["path"]: (made / item["key"]).read_bytes()}, 0o644)
    own = mount(here / "own", {"producer.secret": secrets["producer-1.secret"]}, 0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(own))
    mine = producer_keys(trainer / "keys", None)
    assert (mine.identity, mine.trainer) == ("producer-1", publics["trainer"])


def test_applying_hands_over_every_key_and_no_other(here: Path, tmp_path: Path) -> None:
    manifests(here, "--producers", "2")
    programs, out = tmp_path / "bin", here / "out"
    stand_in(
        programs,
        "kubectl",
        'if [ "$1" = get ]; then exit 1; fi; if [ "$*" = "apply --filename=-" ]; then cat >>applied; fi',
    )
    (out / "keys.sh").write_text((out / "keys.sh").read_text().replace("export PATH=", "# PATH="))
    stand_in(programs, "rl-keys", KEYS)
    done = bash(out / "apply.sh", programs, PRODUCERS="3")
    assert done.returncode == 0, done.stderr
    name = run_name(out)
    made = [call for call in calls(programs) if call.startswith("kubectl create secret")]
    handed = {call.split()[4]: re.findall(r"--from-file=keys/(\S+)", call) for call in made}
    names = [f"producer-{number}" for number in range(3)]
    assert handed == {
        f"{name}-trainer-key": ["trainer.secret"],
        f"{name}-authorized": [f"authorized/{each}.public" for each in names],
        f"{name}-producer-keys": ["trainer.public", *(f"{each}.secret" for each in names)],
    }
    [producers] = yaml.safe_load_all((out / "applied").read_text())
    assert (producers["spec"]["completions"], producers["spec"]["parallelism"]) == (3, 3)
