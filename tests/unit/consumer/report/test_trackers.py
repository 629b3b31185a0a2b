"""The ids by which trackers go on with a run, by starts of it."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from consumer.report.trackers import FILE, TrackerRuns

IDS = ("WANDB_RUN_ID", "COMET_EXPERIMENT_KEY", "SWANLAB_RUN_ID", "NEPTUNE_CUSTOM_RUN_ID", "TENSORBOARD_LOGGING_DIR")
NAMES = ["wandb", "comet_ml", "swanlab", "neptune", "tensorboard"]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ, clear=True):
        yield


def variables(run_dir: Path, run_id: str = "run", names: list[str] = NAMES, **given: str) -> dict[str, str]:
    os.environ.clear()
    os.environ.update(given)
    TrackerRuns(run_dir, run_id, names).set_variables()
    return dict(os.environ)


def test_each_start_of_a_run_has_the_same_ids_and_another_run_has_others(tmp_path: Path) -> None:
    first = variables(tmp_path)
    assert set(IDS) < first.keys()
    assert (first["WANDB_RESUME"], first["SWANLAB_RESUME"]) == ("allow", "allow")
    assert (len(first["COMET_EXPERIMENT_KEY"]), len(first["SWANLAB_RUN_ID"])) == (32, 21)
    assert variables(tmp_path) == first
    other = variables(tmp_path, "another run")
    assert all(other[name] != first[name] for name in IDS)


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    given = {"WANDB_RUN_ID": "mine", "SWANLAB_RESUME": "must"}
    found = variables(tmp_path, names=["wandb", "swanlab"], **given)
    assert found == given | {"SWANLAB_RUN_ID": found["SWANLAB_RUN_ID"]}
    assert variables(tmp_path / "none", names=[]) == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": "run", "id": 7}'])
def test_a_broken_file_is_a_new_beginning(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert variables(tmp_path)["WANDB_RUN_ID"] == json.loads((tmp_path / FILE).read_text())["id"]


def test_the_id_that_mlflow_gives_is_that_of_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(info=SimpleNamespace(run_id="of-the-server"))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: active))
    first = TrackerRuns(tmp_path, "run", ["mlflow"])
    first.set_variables()
    assert "MLFLOW_RUN_ID" not in os.environ
    first.on_train_begin(None, None, None)
    TrackerRuns(tmp_path, "run", ["mlflow"]).set_variables()
    assert os.environ["MLFLOW_RUN_ID"] == "of-the-server"
