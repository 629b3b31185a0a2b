"""However many ranks share a step, its loss, gradient and metrics are those of one process, and all ranks have the same bits.

In float64, with ranks that are threads; `tests/integration/test_ranks.py` has processes.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.learn.importance import PRESETS, resolve
from consumer.learn.micro_batches import StepSplitter
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.weight_snapshots import whole
from protocol.config.learning import CorrectionSection
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.learn.test_answer_steps import ANSWERS
from tests.unit.consumer.learn.test_credit_steps import rewarded
from tests.unit.consumer.learn.test_distillation_steps import TEACHERS, with_top
from tests.unit.consumer.learn.test_loss_parity import LOSS_TYPES, off_policy, some_groups
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks
from tests.unit.consumer.trl_reference import lora_parameters, metrics_of, slipstream_trainer

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, dict[str, Any]] = {
    "kl": {"beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence"},
    "entropy": {"entropy_coef": 0.05},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.25},
    "truncated": {"mask_truncated_completions": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "two iterations": {"num_iterations": 2},
}


UNLIKE = ("step_time", "pipeline/micro_batch_tokens")
"""Metrics of how a step was taken, which ranks take in other passes."""


def of_step(trainer: SlipstreamTrainer, groups: list[Any]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of one step over the groups."""
    trainer.model.zero_grad()
    trainer.create_optimizer_and_scheduler(2)
    trainer._choose_passes()
    trainer._splitter.begin(trainer.recipe, groups, ANSWERS if trainer._answer_coef else ())
    loss = trainer.training_step(trainer.model, trainer._splitter.split(1), None)
    gradient = torch.cat([whole(parameter.grad).flatten() for parameter in lora_parameters(trainer)])
    metrics = {name: value for name, value in metrics_of(trainer).items() if name not in UNLIKE}
    return loss.item(), gradient, metrics


Trainers = list[SlipstreamTrainer]


@pytest.fixture
def trainers_of(tmp_path: Path, one_layer_model: Path) -> Callable[[int, dict[str, Any]], Trainers]:
    """Makes one that is alone, and so many ranks."""

    def made(world: int, options: dict[str, Any], sections: dict[str, Any] | None = None, **rewards: Any) -> Trainers:
        more = {"correction": {"ratio_max": 1.5}, "rewards": rewards} | (sections or {})
        config = run_config(tmp_path, one_layer_model, trainer=options, **more)
        return [slipstream_trainer(config, one_layer_model) for _ in range(1 + world)]

    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, one_layer_model: Path) -> Trainers:
    """One that is alone, and three ranks, for tests of what the loss looks at in every step."""
    config = run_config(tmp_path_factory.mktemp("plain"), one_layer_model, correction={"ratio_max": 1.5})
    return [slipstream_trainer(config, one_layer_model) for _ in range(1 + 3)]


def assert_same(alone: SlipstreamTrainer, *trainers: SlipstreamTrainer) -> None:
    groups = with_top(rewarded(off_policy(alone, some_groups(3))), 16)
    loss, gradient, metrics = of_step(alone, groups)
    assert gradient.abs().max() > 1e-4

    def step(ranks: ThreadRanks) -> Any:
        trainer = trainers[ranks.rank]
        trainer._ranks = ranks
        trainer.recipe = dataclasses.replace(trainer.recipe, rank=ranks.rank, world=ranks.world)
        trainer._splitter = StepSplitter(30, ranks, lambda step: None)
        return of_step(trainer, groups)

    found = on_ranks(len(trainers), step)
    assert found[0][2] == pytest.approx(metrics, rel=1e-10, abs=1e-12)
    for other_loss, other_gradient, other_metrics in found:
        assert other_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-10, atol=1e-12)
        assert other_metrics in (found[0][2], {}), "rank 0 alone reports"
        assert torch.equal(other_gradient, found[0][1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "two iterations" else pytest.mark.long) for name in OPTIONS]
)
def test_a_step_of_several_ranks(trainers_of: Callable[..., Trainers], name: str) -> None:
    assert_same(*trainers_of(2, OPTIONS[name]))


@pytest.mark.long
def test_ranks_without_rows(trainers_of: Callable[..., Trainers]) -> None:
    assert_same(*trainers_of(16, {}))


@pytest.mark.long
@pytest.mark.parametrize("rewards", [{"credit": "per_turn", "gamma": 0.5}, {"credit": "per_step"}, {"credit": "given"}])
def test_rewards_of_spans(trainers_of: Callable[..., Trainers], rewards: dict[str, Any]) -> None:
    alone, *trainers = trainers_of(4, {}, **rewards)
    for world in (2, 3, 4):
        assert_same(alone, *trainers[:world])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["advantage", "divergence"])
@pytest.mark.parametrize("alone", [True, False])
def test_teachers(trainers_of: Callable[..., Trainers], alone: bool, mode: str) -> None:
    sections = {"teachers": TEACHERS, "distillation": {"mode": mode, "coef": 0.5, "alone": alone}}
    one, *trainers = trainers_of(4, {}, sections)
    for world in (2, 4):
        assert_same(one, *trainers[:world])
    assert metrics_of(one)["distillation/logprob_gain" if mode == "advantage" else "distillation/divergence"] != 0


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "beta": 0.1}])
def test_answers(trainers_of: Callable[..., Trainers], options: dict[str, Any]) -> None:
    sections = {"dataset": {"answer_column": "answer"}, "loss": {"ce_coef": 0.25}}
    one, *trainers = trainers_of(4, options, sections)
    for world in (2, 3, 4):
        assert_same(one, *trainers[:world])
    assert metrics_of(one)["ce_loss"] > 1


@pytest.mark.long
@pytest.mark.parametrize("trainable", [[], ["*norm*", "*.mlp.*"]])
def test_whole_weights(trainers_of: Callable[..., Trainers], trainable: list[str]) -> None:
    """Without autocast, which would hide float64."""
    sections = {"lora": None, "dtype": "bfloat16", "trainable": trainable}
    one, *trainers = trainers_of(3, {"bf16": False}, sections)
    for world in (2, 3):
        assert_same(one, *trainers[:world])
    assert (one.model.model.embed_tokens.weight.grad is not None) == (not trainable)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type(plain: Trainers, monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    for trainer in plain:
        monkeypatch.setattr(trainer.args, "loss_type", loss_type)
    assert_same(*plain)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_correction(plain: Trainers, monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    section = CorrectionSection(preset=preset, ratio_max=1.5, token_veto=1e-4)
    for trainer in plain:
        monkeypatch.setattr(trainer, "_correction", resolve(section))
    assert_same(*plain)
