"""Which files of a run's folder go to the trainer's machine."""

import errno
from pathlib import Path
from typing import Any

import pytest

from protocol.config.loader import load_config
from protocol.errors import BundleError, ConfigError, ExitCode
from slipstream.cluster.render.deployment import Deployment, Size
from slipstream.cluster.render.run_files import run_files
from slipstream.cluster.render.written import write
from tests.unit.slipstream.cluster.render.rendered import project, render


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(here: Path, config_file: str = "run.yaml", **sections: Any) -> dict[str, bytes]:
    project(here, **sections)
    config = load_config("run.yaml")
    return run_files(Deployment.of(config, config_file, Size(), "n1", []))


def test_the_configuration_comes_first_and_then_what_it_names_and_that_imports(here: Path) -> None:
    found = files(here)
    assert list(found) == ["run.yaml", "tasks/sums.py", "helpers.py"]
    assert found == {name: (here / name).read_bytes() for name in found}


def test_functions_of_the_datasets_come_along(here: Path) -> None:
    for name in ("first", "second", "held_out"):
        (here / f"{name}.py").write_text("def f(row): ...\n")
    sources = [{"path": "a", "filter": "first:f"}, {"path": "b", "transform": "second.py:f"}]
    evaluation = {"dataset": {"path": "c", "transform": "held_out:f"}, "every_versions": 5}
    assert {"first.py", "second.py", "held_out.py"} <= set(
        files(here, dataset={"sources": sources}, evaluation=evaluation)
    )


def test_a_taskset_that_the_folder_has_comes_along(here: Path) -> None:
    (here / "my_tasks.py").write_text("import helpers\n")
    environment = {"verifiers": {"id": "my-tasks"}}
    serve = {"enabled": True}
    found = files(here, environment=environment, serve=serve, rewards={}, dataset={"path": "rows.jsonl"})
    assert set(found) == {"run.yaml", "my_tasks.py", "helpers.py"}


def test_a_configuration_elsewhere_is_brought_under_its_own_name(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "big.yaml"
    other.write_text("seed: 1\n")
    assert next(iter(files(here, str(other)).items())) == ("big.yaml", b"seed: 1\n")


def test_a_function_that_is_not_there_is_refused(here: Path) -> None:
    with pytest.raises(BundleError, match=r"there is no file gone\.py"):
        files(here, dataset={"path": "rows.jsonl", "transform": "gone.py:f"})


def test_an_absolute_name_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.transform: .*: other machines have another folder"):
        files(here, dataset={"path": "rows.jsonl", "transform": f"{here}/helpers.py:f"})


def test_files_arrive_as_they_are_and_a_second_command_finds_them_so(here: Path) -> None:
    """Line ends of Windows, and a module that is not in UTF-8."""
    file = project(here)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    (here / "helpers.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'Müller'\n".encode("latin-1"))
    for _ in range(2):
        assert render("ssh", here / "out", "--trainer-node", "n1", "--hosts", "n2") == ExitCode.OK
    for name in ("run.yaml", "helpers.py"):
        assert (here / "out/run" / name).read_bytes() == (here / name).read_bytes()


def test_a_full_disk_leaves_no_half_file_for_the_next_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: Path, content: bytes) -> int:
        with place.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(ConfigError, match=f"--out {here}: .*No space left"):
            write(here, {"submit.sh": b"#!/bin/sh\necho submitted\n"})
    assert list(here.iterdir()) == []
    write(here, {"submit.sh": b"#!/bin/sh\necho submitted\n"})
