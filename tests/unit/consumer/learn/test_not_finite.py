"""A step whose gradient is not finite changes nothing, leaves its batch behind, and holds a resumed run up for one try more."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import TrainerCallback

from consumer.learn.loss import NotFiniteStep
from consumer.report.inspection import keep, not_finite
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.app.test_run import Run, column
from tests.unit.consumer.builders import rollout_group


class Poison(TrainerCallback):
    """Spoils the gradient of every batch that holds this prompt."""

    def __init__(self, run: "PoisonedRun") -> None:
        self._run = run
        self._hook: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        groups = self._run.feed.last.groups
        if any(group.lease_id.split("-")[1] == self._run.poisoned for group in groups):
            weight = next(weight for weight in self._run.trainer.model.parameters() if weight.requires_grad)
            self._hook = weight.register_hook(lambda gradient: gradient * torch.nan)
            self._run.before = [tensor.clone() for tensor in self._run.learned()]


class PoisonedRun(Run):
    poisoned = "3"
    before: list[torch.Tensor]

    def prepare(self) -> None:
        self.trainer.add_callback(Poison(self))

    def learned(self) -> list[torch.Tensor]:
        weights = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        states = [value for weight in weights for value in self.trainer.optimizer.state[weight].values()]
        return [*weights, *(value for value in states if isinstance(value, torch.Tensor))]


@pytest.mark.long
def test_the_step_is_not_taken_and_a_batch_that_fails_twice_is_left_out(tmp_path: Path, one_layer_model: Path) -> None:
    run: PoisonedRun = PoisonedRun.__new__(PoisonedRun)
    with pytest.raises(NotFiniteStep, match=r"loss -?[0-9.e-]+, gradient norm nan"):
        run.__init__(tmp_path, one_layer_model)  # type: ignore[misc]
    assert run.trainer.state.global_step == 1
    assert [version for version, _ in run.published] == [0, 1]
    assert len(run.before) > 3
    for now, before in zip(run.learned(), run.before, strict=True):
        assert torch.equal(now, before)
    with pytest.raises(NotFiniteStep):
        PoisonedRun(tmp_path, one_layer_model, resume=True)
    third = PoisonedRun(tmp_path, one_layer_model, resume=True)
    assert column(third, "step") == [1, 2, 3, 4]
    assert third.replay.totals["quarantined"] == 2, "the two groups of that batch"


def test_what_is_kept(tmp_path: Path) -> None:
    group = rollout_group(
        [[5, 6], [7]],
        rewards=[1.0, float("nan")],
        logprobs=[[-0.5, float("nan")], [-0.25]],
        lease_id="0-7-0-1-s",
        version=3,
    )
    batch = TrainingBatch(5, 1, 5, [group], 1)
    for loss in (1.0, float("nan")):  # a second try replaces what the first left
        folder = keep(tmp_path, 5, batch, {"loss": loss, "grad_norm": float("inf")})
    assert folder == tmp_path / "inspect" / "step-5"
    assert sorted(file.name for file in folder.parent.iterdir()) == ["step-5"]
    assert json.loads((folder / "step.json").read_text()) == {
        "step": 5,
        "loss": None,
        "grad_norm": None,
        "groups": [
            {
                "group": "0-7-0-1-s",
                "policy_version": 3,
                "num_tokens": 3,
                "num_unscored_tokens": 1,
                "rewards": [[1.0], [None]],
            }
        ],
    }
    arrays = load_file(folder / "groups.safetensors")
    assert arrays["0-7-0-1-s/completion_ids"].tolist() == [5, 6, 7]
    assert arrays["0-7-0-1-s/versions"].tolist() == [3, 3, 3]
    np.testing.assert_array_equal(arrays["0-7-0-1-s/logprobs"], np.array([-0.5, np.nan, -0.25], np.float32))


def test_names_of_what_is_not_finite() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert not_finite(model.named_parameters(), lambda parameter: parameter) == []
    with torch.no_grad():
        model[1].weight[0, 1] = torch.inf
    assert not_finite(model.named_parameters(), lambda parameter: parameter) == ["1.weight"]
    assert not_finite(model.named_parameters(), lambda parameter: parameter.grad) == []


def test_a_full_disk_costs_the_batch_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    keep(tmp_path, 1, TrainingBatch(1, 1, 1, [rollout_group([[3], [4]])], 1), {})
    assert list((tmp_path / "inspect").iterdir()) == []


def test_of_a_run_that_is_started_again_and_again_the_newest_batches_are_kept(tmp_path: Path) -> None:
    mine = [tmp_path / "inspect" / name for name in ("step-1-of-mine", "step-by-step", "step-0")]
    for folder in mine:
        folder.mkdir(parents=True)
    (mine[0] / "step.json").write_text("{}")
    (tmp_path / "inspect" / "step-notes").write_text("mine")
    batch = TrainingBatch(1, 1, 1, [rollout_group([[3], [4]])], 1)
    for number, step in enumerate((90, *range(1, 12))):  # step 90 was undone
        folder = keep(tmp_path, step, batch, {})
        os.utime(folder, (1e9 + number, 1e9 + number))
    kept = {folder.name for folder in (tmp_path / "inspect").iterdir()}
    assert kept == {f"step-{step}" for step in range(4, 12)} | {folder.name for folder in mine} | {"step-notes"}
