"""What of a run the rendered files know, and what is refused before one is written."""

import re
from pathlib import Path

import pytest

from protocol.config.loader import load_config
from protocol.errors import ConfigError
from slipstream.cluster.cli import main
from slipstream.cluster.render.deployment import Deployment, Size, plain
from tests.unit.slipstream.cluster.render.rendered import project, render

REPOSITORY = Path(__file__).parents[5]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def deployment(here: Path, *overrides: str, host: str | None = None, **sections: object) -> Deployment:
    file = project(here, **sections)
    return Deployment.of(load_config(str(file), list(overrides)), "run.yaml", Size(), host, overrides)


def test_a_configuration_of_a_laptop_gets_an_address(here: Path) -> None:
    found = deployment(here, "seed=7", host="gpu01")
    assert (found.address, found.rendezvous, found.port) == ("tcp://gpu01:5557", "gpu01:5559", 5557)
    assert found.trainer_overrides("/keys") == [
        "seed=7",
        "transport.keys=/keys",
        "transport.endpoint=tcp://0.0.0.0:5557",
    ]
    assert (found.config_file, found.folder) == (here / "run.yaml", here)


@pytest.mark.parametrize(
    "runs",
    [
        ("runs/math/v1", "runs/code/v1"),
        ("runs/qwen2.5-1.5b-instruct-gsm8k-lora-r32-seed-1", "runs/qwen2.5-1.5b-instruct-gsm8k-lora-r32-seed-2"),
    ],
)
def test_runs_of_other_folders_have_other_names(here: Path, runs: tuple[str, str]) -> None:
    names = [deployment(here / str(number), host="n", run_dir=run).name for number, run in enumerate(runs)]
    assert names[0] != names[1]
    for name in names:
        assert re.fullmatch(r"rl-[a-z0-9-]{1,36}[a-z0-9]", name), (
            "a label of Kubernetes with `-producer-keys` behind it"
        )


def test_a_name_stays_however_the_folder_is_written(here: Path) -> None:
    found = {deployment(here, host="n", run_dir=run).name for run in ("runs/a", "./runs/a", str(here / "runs" / "a"))}
    assert len(found) == 1


@pytest.mark.parametrize("again", ["slurm", "kubernetes"])
def test_a_folder_of_another_run_is_refused(here: Path, again: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for another scheduler, whose files have other names: both would share `keys`."""
    project(here)
    assert render("slurm", here / "out", "--trainer-node", "n1") == 0
    before = sorted(here.glob("out/*"))
    assert render(again, here / "out", "--trainer-node", "n1", "--set", "run_dir=runs/other") == 78
    assert "run_name" in capsys.readouterr().err
    assert sorted(here.glob("out/*")) == before


def test_an_address_in_the_configuration_stays(here: Path) -> None:
    found = deployment(here, transport={"endpoint": "tcp://10.0.0.5:6000", "keys": "keys"})
    assert (found.host, found.address, found.rendezvous) == ("10.0.0.5", "tcp://10.0.0.5:6000", "10.0.0.5:6002")
    assert found.trainer_overrides("/keys") == ["transport.keys=/keys"]
    assert found.trainer_overrides("/keys", everywhere=True)[-1] == "transport.endpoint=tcp://0.0.0.0:6000"


def test_a_node_beside_an_address_has_the_run_and_not_the_address(here: Path) -> None:
    found = deployment(here, host="n7", transport={"endpoint": "tcp://10.0.0.5:6000", "keys": "keys"})
    assert (found.host, found.address) == ("n7", "tcp://10.0.0.5:6000")


def test_a_trainer_that_nobody_finds_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="Name its node with --trainer-node, or its address"):
        deployment(here)
    with pytest.raises(ConfigError, match="--trainer-node a; reboot: expected the name or address of a machine"):
        deployment(here / "other", host="a; reboot")


@pytest.mark.parametrize(("path", "folder"), [("model", "model"), ("./model", "model"), ("/models/q", "/models/q")])
def test_a_model_that_is_a_folder_is_told_by_its_whole_name(here: Path, path: str, folder: str) -> None:
    (here / "model").mkdir()
    assert deployment(here, host="n", model={"path": path}).model_folder == here / folder


def test_a_model_of_the_hub_is_no_folder(here: Path) -> None:
    assert deployment(here, host="n").model_folder is None


def test_paths_that_a_scheduler_would_read_otherwise_are_refused() -> None:
    assert plain(Path("/home/a_b/c+d.e-f")) == Path("/home/a_b/c+d.e-f")
    for path in ("/home/a b", "/home/%j", "/home/$x", "/home/a\nb", "/home/'a'"):
        with pytest.raises(ConfigError, match="letters, digits and"):
            plain(Path(path))


def test_files_that_somebody_changed_are_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project(here)
    assert render("slurm", here / "out", "--trainer-node", "n1") == 0
    assert render("slurm", here / "out", "--trainer-node", "n1") == 0, "the same once more"
    (here / "out" / "submit.sh").write_text("mine")
    assert render("slurm", here / "out", "--trainer-node", "n2") == 78
    error = capsys.readouterr().err
    assert "submit.sh, trainer.sbatch, producers.sbatch is there with other content" in error
    assert "nodelist=n1" in (here / "out" / "trainer.sbatch").read_text()


def test_a_run_on_a_network_disk_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project(here)
    monkeypatch.setattr("slipstream.cluster.render.command.file_system", lambda place: "nfs4")
    assert render("slurm", here / "out", "--trainer-node", "n1") == 78
    assert f"run_dir: {here}/runs/My_Run is on a network file system (nfs4)" in capsys.readouterr().err


def test_one_gpu_for_both_is_refused_where_there_are_gpus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project(here, pipeline={"gpu": "shared"})
    assert render("slurm", here / "out", "--trainer-node", "n1") == 78
    assert "pipeline.gpu: shared puts trainer and producer on one GPU" in capsys.readouterr().err
    assert render("slurm", here / "out", "--trainer-node", "n1", "--gpus", "0") == 0


def test_every_command_of_the_page_writes_what_the_page_says(here: Path) -> None:
    project(here)
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    found = re.findall(r"^rl-cluster (render .*)$", page, re.M)
    assert [main(command.split()) for command in found] == [0, 0, 0]
    for script in re.findall(r"`?((?:jobs|manifests|hosts)/[\w.]+)", page):
        assert (here / script).is_file() or script == "hosts/keys", script


def test_the_number_of_producers_may_come_from_the_configuration(here: Path) -> None:
    project(here, producers={"min": 3, "max": 5})
    assert render("slurm", here / "out", "--trainer-node", "n1") == 0
    assert "#SBATCH --array=0-2\n" in (here / "out" / "producers.sbatch").read_text()
