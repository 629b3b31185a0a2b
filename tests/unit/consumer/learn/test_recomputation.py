"""Gradient checkpointing by memory: equal numbers with any number of recomputed layers, and as few of them as the room allows."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from consumer.learn import recomputation
from consumer.learn.forward import Tokens, hidden_states, tree_layout
from consumer.learn.memory import USED_SHARE
from consumer.learn.micro_batches import StepSplitter, loss_mask
from consumer.learn.recomputation import ENOUGH_TOKENS
from consumer.learn.trainer import SlipstreamTrainer
from protocol.config.learning import FIRST_TOKENS
from tests.integration.models import build_model
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.learn.test_loss_parity import some_groups
from tests.unit.consumer.ranks.test_parity import of_step
from tests.unit.consumer.trl_reference import slipstream_trainer

LAYERS = 3
PASSES = 30  # tokens of one of several passes

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, float64: None) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("llama") / "model", num_layers=LAYERS)


def trainer_of(folder: Path, model: Path, *, by_memory: bool = True, **options: Any) -> SlipstreamTrainer:
    config = run_config(
        folder,
        model,
        trainer=options,
        lora={"lora_dropout": 0.3},
        pipeline={"trainer_tokens_per_micro_batch": PASSES},
    )
    if by_memory:
        del config.trainer["gradient_checkpointing"]
    return slipstream_trainer(config, model)


def room(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Let passes have so many bytes in all."""
    monkeypatch.setattr(recomputation, "_room_of_host", lambda: num_bytes / recomputation._SHARE_OF_HOST)


def calls_of_layers(trainer: SlipstreamTrainer) -> list[int]:
    """How often each layer computes, from now on. (The hooks of a layer are outside what transformers 5.23 recomputes.)"""
    layers = trainer.base.model.layers
    counts = [0] * len(layers)

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            counts[number] += 1

        return hook

    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(count(number))
    return counts


@pytest.mark.long
def test_the_numbers_are_those_without(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout. The first pass recomputes all layers but the last; the others what fits."""
    plain = trainer_of(tmp_path, model, by_memory=False)
    torch.manual_seed(3)
    expected = of_step(plain, some_groups(3))
    for num_bytes in (0, 10**12):
        room(monkeypatch, num_bytes)
        trainer = trainer_of(tmp_path, model)
        counts = calls_of_layers(trainer)
        torch.manual_seed(3)
        loss, gradient, _ = of_step(trainer, some_groups(3))
        passes = len(trainer._passes)
        assert passes > 2
        assert loss == expected[0]
        assert torch.equal(gradient, expected[1])
        assert counts == ([passes + 1, passes + 1, passes] if num_bytes else [2 * passes, 2 * passes, 2 * passes - 1])


@pytest.mark.long
def test_as_few_layers_as_the_room_allows(tmp_path: Path, model: Path) -> None:
    """A layer more in the room is a layer less to recompute, those near the input last."""
    trainer, places, numbers = trainer_of(tmp_path, model), 40, []
    layers = trainer._recomputed
    with layers.of_pass(places):
        states(trainer)
    for share in (0.01, 0.45, 0.65, 0.85, 1.01):
        layers._room = share * places * layers._bytes(0) / USED_SHARE
        with layers.of_pass(places):
            pass
        flags = [layer.gradient_checkpointing for layer in trainer.base.model.layers]
        assert flags == sorted(flags, reverse=True)
        numbers.append(sum(flags))
    assert numbers == [3, 3, 2, 1, 0]


def states(trainer: SlipstreamTrainer) -> torch.Tensor:
    """Hidden states of one pass."""
    trainer.model.train()
    batch = trainer.recipe.tensors(some_groups(1))[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    assert trainer.row_passes.kernel is not None
    return hidden_states(
        trainer.base.model, tree_layout(Tokens(ids, mask, loss_mask(batch)), trainer.row_passes.kernel.make)
    )


@pytest.mark.long
def test_what_a_layer_keeps_is_what_autograd_keeps(tmp_path: Path, model: Path) -> None:
    """Measured in the last layer, all layers together keep what a pass without recomputation does, but for its two ends."""
    trainer = trainer_of(tmp_path, model)
    with trainer._recomputed.of_pass(1):
        states(trainer)
    kept = dict[int, int]()
    weights = {each.untyped_storage().data_ptr() for each in trainer.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trainer._recomputed._recompute(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states(trainer)
    assert LAYERS * trainer._recomputed._kept == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.long
def test_shorter_passes_before_recomputed_ones(tmp_path: Path, model: Path) -> None:
    """Passes that recompute nothing are preferred to long ones, if they are long enough."""
    layers = trainer_of(tmp_path, model)._recomputed
    assert layers.fitting_tokens() is None  # nothing was measured
    layers._is_measured, layers._kept, layers._input = True, 1000.0, 100.0
    whole = layers._bytes(0)
    for tokens, expected in ((6 * 1024, 6 * 1024), (2 * 1024, ENOUGH_TOKENS), (2 * FIRST_TOKENS, None)):
        layers._room = tokens * whole / USED_SHARE + 1
        assert layers.fitting_tokens() == expected, tokens
    layers._room = 0.0
    assert layers.fitting_tokens() == 1024


@pytest.mark.long
def test_what_the_user_chose_stays(tmp_path: Path, model: Path) -> None:
    for options in ({"gradient_checkpointing": True}, {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}):
        config = run_config(tmp_path, model, trainer=options)
        if "gradient_checkpointing" not in options:
            del config.trainer["gradient_checkpointing"]
        trainer = slipstream_trainer(config, model)
        assert trainer.args.gradient_checkpointing
        assert not trainer._recomputed._layers
    chosen = trainer_of(tmp_path, model)
    assert not chosen.args.gradient_checkpointing
    assert chosen._recomputed._layers


@pytest.mark.long
def test_a_device_without_memory_recomputes_all_layers_before_passes_get_smaller(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not ask what fits again."""
    room(monkeypatch, 10**12)
    trainer = trainer_of(tmp_path, model)
    trainer._splitter = StepSplitter("auto", trainer._ranks, lambda step: None)
    backward, refused = trainer.accelerator.backward, list[int]()

    def refusing(loss: torch.Tensor) -> None:
        recomputed = sum(layer.gradient_checkpointing for layer in trainer.base.model.layers)
        if recomputed < LAYERS:
            refused.append(recomputed)
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss)

    trainer.accelerator.backward = refusing
    of_step(trainer, some_groups(2))
    assert refused == [LAYERS - 1]
    assert trainer._splitter.tokens == FIRST_TOKENS
    assert trainer._recomputed.fitting_tokens() is None
    assert not trainer._recomputed.recompute_all()


def test_a_container_has_the_room_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "_CGROUP", tmp_path)
    available = psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
    assert recomputation._room_of_host() == available
    (tmp_path / "memory.max").write_text("max\n")
    assert recomputation._room_of_host() == available
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 500\nshmem 100\n")  # pages of files are given back
    assert recomputation._room_of_host() == 600
