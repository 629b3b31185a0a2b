"""What `rl-sft` writes is on the disk when its folder appears, and an end before leaves nothing."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.models import random_adapter
from tests.unit.consumer.builders import run_config
from tools.sft import run as sft


def run(folder: Path, model: Path) -> Path:
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    sft.run(run_config(folder, model, sft={"completion_column": "answer"}), [], to=folder / "sft")
    return folder / "sft"


def test_the_adapter_is_on_the_disk(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def watched_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def trained(model_folder: Path, *_: Any) -> Any:
        return SimpleNamespace(save_pretrained=lambda folder: random_adapter(model_folder, folder, rank=4))

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(sft, "train", trained)
    to = run(tmp_path / "run", tiny_model)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in to.iterdir()}
    assert {place.stat().st_ino for place in (to, to.parent, *to.iterdir())} <= synced


def test_a_training_that_fails_leaves_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model_folder: Path, arguments: Any, *_: Any) -> Any:
        Path(arguments.output_dir).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", tiny_model)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["train.jsonl"]
