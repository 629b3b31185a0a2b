"""`slipstream sft` that ends before its adapter is whole leaves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import DeviceError
from slipstream import sft as sft
from tests.unit.consumer.builders import run_config


def run(folder: Path, model: Path) -> Path:
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    sft.run(run_config(folder, model, sft={"completion_column": "answer"}), [], to=folder / "sft")
    return folder / "sft"


def test_a_training_that_fails_leaves_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model_folder: Path, arguments: Any, *_: Any) -> Any:
        (Path(arguments.output_dir) / "begun").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", tiny_model)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["train.jsonl"]


def test_several_gpus_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(DeviceError, match="--gpu 0,1: slipstream sft, a short warm start, trains on one GPU"):
        sft.run(run_config(tmp_path, tiny_model), [0, 1], to=tmp_path / "sft")
