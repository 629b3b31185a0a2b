"""When the base is spread over the ranks, what of it, and what is refused. Training on one is an integration test."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from consumer.learn import model as sharding
from consumer.learn.model import is_sharded, shard_base
from protocol.errors import ConfigError

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, 10).to(dtype), requires_grad=False)  # 200 bytes
        self.norm = nn.Parameter(torch.zeros(10), requires_grad=False)  # 40 bytes
        self.lora = nn.Parameter(torch.zeros(10, 2))


class Model(nn.Module):
    _no_split_modules = ("Layer",)
    base_model_prefix = "base_model"

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleList(layers)
        self.head = nn.Parameter(torch.zeros(30), requires_grad=False)  # 120 bytes

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model[0]


class Ranks:
    """Two of them; the other one's memory is `other_room`."""

    rank, world, mesh = 0, 2, "mesh"

    def __init__(self, other_room: float = 1e12) -> None:
        self._other_room = other_room

    def gather(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([value, torch.tensor([self._other_room])]) for name, value in values.items()}


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, set[nn.Parameter]]]:
    """What was spread, and which of its parameters were not."""
    found: list[tuple[nn.Module, set[nn.Parameter]]] = []

    def record(module: nn.Module, *, mesh: Any, ignored_params: set[nn.Parameter]) -> None:
        assert mesh == "mesh"
        found.append((module, ignored_params))

    monkeypatch.setattr(sharding, "fully_shard", record)
    return found


def test_layers_are_spread_but_for_what_is_trained_and_the_few_of_another_type(spread: Any) -> None:
    model = Model(Layer(), Layer())
    shard_base("layers", model, Ranks(), CPU)  # type: ignore[arg-type]
    first, second = model.base_model
    (layer, whole), (other, _), (root, around) = spread
    assert (layer, other, root) == (first, second, model.base_model)
    assert whole == {first.lora, second.lora, first.norm}
    assert around == set(model.parameters())


@pytest.mark.parametrize(
    ("choice", "total", "other_room", "expected"),
    [
        # The base has 360 bytes. A rank has half of the host's memory, and the base may take 60 % of it.
        ("auto", 1210, 1e12, False),
        ("auto", 1190, 1e12, True),
        ("auto", 1210, 590.0, True),  # of another host
        ("none", 10, 10.0, False),
        ("layers", 10**12, 1e12, True),
    ],
)
def test_what_does_not_fit_the_smallest_rank_is_spread(
    monkeypatch: pytest.MonkeyPatch, spread: Any, choice: Any, total: int, other_room: float, expected: bool
) -> None:
    monkeypatch.setattr(sharding.psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    shard_base(choice, Model(Layer()), Ranks(other_room), CPU)  # type: ignore[arg-type]
    assert bool(spread) == expected


def test_weights_that_train_are_spread_whatever_their_size(monkeypatch: pytest.MonkeyPatch, spread: Any) -> None:
    given: list[Any] = []
    monkeypatch.setattr(sharding, "shard_weights", lambda *args, **options: given.append((args, options)))
    model = Model(Layer(), Layer())
    shard_base("auto", model, Ranks(), CPU, trains=True, casts=True)  # type: ignore[arg-type]
    shard_base("none", model, Ranks(), CPU, trains=True)  # type: ignore[arg-type]
    assert given == [((model, list(model.base_model), "mesh"), {"casts": True, "keeps": True})]
    assert not spread


def test_one_rank_keeps_all_of_it(spread: Any) -> None:
    model, ranks = Model(Layer()), Ranks()
    ranks.world = 1
    shard_base("layers", model, ranks, CPU)  # type: ignore[arg-type]
    assert not spread
    assert not is_sharded(model)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Model(nn.Linear(2, 2)), "Model does not name .* decoder layers"),
        (Model(Layer(torch.uint8)), r"its layers are quantized \(torch.uint8\)"),
    ],
)
def test_what_cannot_be_spread_is_refused_with_the_fix(spread: Any, model: Model, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"pipeline.shard_base: {text}.*set it to none"):
        shard_base("layers", model, Ranks(), CPU)  # type: ignore[arg-type]
