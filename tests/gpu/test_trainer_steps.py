"""Steps of the real trainer on the stand-in GPU: their numbers, their memory, and how often the host waits for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from consumer.learn.memory import random_state, set_random_state
from consumer.learn.trainer import SlipstreamTrainer
from protocol.config.learning import FIRST_TOKENS
from protocol.errors import DeviceError
from tests.gpu.conftest import Model
from tests.gpu.stand_in.cuda import Gpu
from tests.gpu.syncs import Syncs
from tests.gpu.trainers import trainer

pytestmark = pytest.mark.stand_in

ROWS: dict[str, Any] = {"model_init_kwargs": {"attn_implementation": "eager"}}
LONG = [[token] * 1200 for token in (3, 4, 5, 6)]
"""Of which two groups are 9,608 tokens."""
MIB = 2**20


def test_a_step_that_is_large_enough_to_be_measured(tmp_path: Path, model: Model) -> None:
    """From the memory that a pass of 9,608 tokens takes, the trainer learns how many tokens the next may have."""
    trained = trainer(
        tmp_path, model("llama"), completions=LONG, sampled=2, trainer=ROWS
    )  # a tree would have them once
    trained.train()
    assert trained.last is not None
    assert trained.last.plan.tokens == FIRST_TOKENS
    assert trained._splitter.tokens > FIRST_TOKENS


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"prompt": [5] * 20}),
        ("gemma3", {}),
        ("qwen3_moe", {"trainer": {"router_aux_loss_coef": 0.01}, "lora": {"target_modules": ["q_proj", "v_proj"]}}),
        ("llama", {"trainer": {"beta": 0.1, "num_iterations": 2}}),
    ],
)
def test_the_same_weights_as_on_the_cpu(
    family: str, options: dict[str, Any], tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32. On the GPU TRL's kernel computes log-probs and entropies, on the CPU ours. Adam divides a gradient by its own
    size, so what a gradient near nothing changes depends on how the CPU rounds. The update as a whole does not."""

    def update(*, on_gpu: bool) -> torch.Tensor:
        made = trainer(tmp_path, model(family), steps=2, dtype="float32", on_gpu=on_gpu, **options)
        assert made.accelerator.device.type == ("cuda" if on_gpu else "cpu")
        before = adapter_of(made)
        made.train()
        return adapter_of(made) - before

    on_gpu = update(on_gpu=True)
    AcceleratorState._reset_state(True)  # it keeps the device of the first trainer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = update(on_gpu=False)
    assert torch.dist(on_gpu, on_cpu) < 1e-3 * on_cpu.norm()


def adapter_of(made: SlipstreamTrainer) -> torch.Tensor:
    named = sorted((name, each) for name, each in made.model.named_parameters() if each.requires_grad)
    return torch.cat([each.detach().cpu().flatten() for _, each in named])


def limited(gpu: Gpu, num_bytes: int) -> None:
    """Leave so many bytes beside what is allocated now."""
    torch.cuda.empty_cache()
    gpu.total_bytes = gpu.allocated_bytes + num_bytes


def test_a_step_without_room_is_cut_into_smaller_passes(tmp_path: Path, model: Model, gpu: Gpu) -> None:
    options: dict[str, Any] = {"completions": [ids[:400] for ids in LONG], "sampled": 2, "dtype": "float32"}
    whole = trainer(tmp_path, model("llama"), **options)
    whole.train()
    trained = trainer(tmp_path, model("llama"), **options)
    limited(gpu, 24 * MIB)
    trained.train()
    assert trained.last is not None
    assert trained.last.plan.tokens < FIRST_TOKENS
    assert whole.last is not None
    assert trained.last.loss == pytest.approx(whole.last.loss, rel=1e-4, abs=1e-6)
    assert trained.last.grad_norm == pytest.approx(whole.last.grad_norm, rel=1e-4, abs=1e-6)


def test_layers_are_recomputed_as_the_memory_of_the_card_asks(tmp_path: Path, model: Model, gpu: Gpu) -> None:
    """With a card that holds a pass, nothing is. With one that does not, some layers are, and the passes of later steps are
    shorter."""
    options: dict[str, Any] = {"completions": [ids[:400] for ids in LONG], "sampled": 2, "dtype": "float32", "steps": 2}
    whole = trainer(tmp_path, model("llama"), by_memory=True, **options)
    whole.train()
    assert [layer.gradient_checkpointing for layer in whole.base.model.layers] == [False, False]
    trained = trainer(tmp_path, model("llama"), by_memory=True, **options)
    limited(gpu, 8 * MIB)
    trained.train()
    assert trained.base.model.layers[0].gradient_checkpointing
    assert trained._splitter.tokens < FIRST_TOKENS
    assert trained.last is not None
    assert whole.last is not None
    assert trained.last.loss == pytest.approx(whole.last.loss, rel=1e-4, abs=1e-6)
    assert trained.last.grad_norm == pytest.approx(whole.last.grad_norm, rel=1e-4, abs=1e-6)


def test_a_completion_without_room_ends_the_trainer(tmp_path: Path, model: Model, gpu: Gpu) -> None:
    trained = trainer(tmp_path, model("llama"), completions=[ids[:400] for ids in LONG], sampled=2)
    limited(gpu, MIB // 4)
    with pytest.raises(DeviceError, match="single completion"):
        trained.train()


LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a tree": ("llama", {"prompt": [5] * 40}, 0),
    "a tree with checkpointing": ("llama", {"trainer": {"gradient_checkpointing": True}}, 0),
    "a tree with windows": ("gemma3", {}, 0),
    "rows": ("llama", {"trainer": ROWS}, 1),
}
"""By layout: a family and options that lead to it, and how often the host waits: transformers asks the GPU once for each kind of
attention mask."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_hardly_waits_within_a_pass(layout: str, tmp_path: Path, model: Model) -> None:
    family, options, of_transformers = LAYOUTS[layout]
    trained, syncs = trainer(tmp_path, model(family), steps=2, **options), Syncs()
    trained._part_of_loss = syncs.watch(trained._part_of_loss)  # type: ignore[method-assign]
    trained.train()
    assert syncs.num_calls == 2
    assert syncs.found.total() <= 2 * of_transformers, syncs.found


def test_random_numbers_of_the_gpu_can_be_drawn_again() -> None:
    device = torch.device("cuda")
    state = random_state(device)
    drawn = torch.rand(4, device=device)
    set_random_state(device, state)
    assert torch.equal(torch.rand(4, device=device), drawn)
    set_random_state(device, state[:16])  # of another kind of device
    assert random_state(device) != state
