"""What ends a trainer whose model cannot be built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumer.app import run
from consumer.app.setup import RunStart
from consumer.learn.checkpoints import Checkpoint
from protocol.errors import ConfigError, DeviceError

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


class Trainer:
    """Fails when it is built, or when it loads a checkpoint."""

    def __init__(self, at_once: Exception | None, later: Exception | None = None) -> None:
        self._at_once, self._later = at_once, later

    def __call__(self, *_: Any) -> "Trainer":
        if self._at_once is not None:
            raise self._at_once
        return self

    def _load_from_checkpoint(self, folder: str) -> None:
        assert self._later is not None
        raise self._later


def start(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    setup: Any = SimpleNamespace(
        answers=None,
        weights=None,
        config=SimpleNamespace(changes_base=False, run_dir=""),
        arguments=SimpleNamespace(report_to=()),
        lora=None,
        model_folder=None,
        initial_adapter=None,
        prompts=[],
    )
    monkeypatch.setattr(run, "SlipstreamTrainer", trainer)
    monkeypatch.setattr(run.Run, "_probe_of", lambda *_: None)
    monkeypatch.setattr(run.Run, "attach", lambda *_: None)
    run.Run(setup, RunStart("run", Checkpoint(Path("checkpoint-3"), {})), unused, unused, unused).load()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceError),
        (LOST, RuntimeError),
        (ValueError("this does not fit"), ConfigError),
    ],
)
@pytest.mark.parametrize("when", ["building", "resuming"])
def test_only_what_a_library_refuses_is_a_wrong_configuration(
    error: Exception, expected: type[Exception], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(error) if when == "building" else Trainer(None, error)
    with pytest.raises(expected) as caught:
        start(trainer, monkeypatch)
    assert type(caught.value) is expected
