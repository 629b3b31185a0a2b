"""The proof by bits on real engines: no adapter that is right is refused, and none that a worker holds wrongly is taken."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter, AdapterRefusedError
from protocol.wire.adapter_blob import checksum_of
from tests.integration.engines import LiveEngine, live_engine, on_engine
from tests.integration.faulty_workers import FILE
from tests.integration.models import build_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOKENS = [5, 6, 7, 8, 9, 20, 30, 40]
NUMBERS = {
    fault: 100 + 2 * number
    for number, fault in enumerate(
        [
            "nothing is loaded",
            "the base is served",
            "alpha is halved",
            "q_proj is missing",
            "an old adapter under the new name",
            "two parts are exchanged",
            "a layer stays",
            "another adapter is held",
        ]
    )
}
"""Of adapters of the tests, by fault."""
HOLDS_OTHER = "the engine holds other numbers than were published for"


OTHER_WEIGHTS = "are not the base with the update of the published adapter"


@contextmanager
def engine_of(folder: Path, dtype: str, mode: str, workers: str) -> Iterator[LiveEngine]:
    own, extension = own_arguments, {"worker_extension_cls": f"tests.integration.faulty_workers.{workers}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.engine.configuration.own_arguments", lambda *given: own(*given) | extension)
        model = build_model("llama", folder / "model")
        with live_engine(model, folder, dtype=dtype, swap={"mode": mode}) as engine:
            yield engine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    with engine_of(tmp_path_factory.mktemp("adapter"), request.param, "adapter", "FaultyLoading") as engine:
        yield engine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def merged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    with engine_of(tmp_path_factory.mktemp("merged"), request.param, "merged", "FaultyMerging") as engine:
        yield engine


def adapter(live: LiveEngine, number: int, fault: str = "") -> Adapter:
    """Version 2 as adapter `number`, which the workers take with this fault."""
    made = live.adapter(2, number)
    if fault:
        (made.path / FILE).write_text(f"{fault}\n{live.peft_folder(1)}")
    return made


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing is loaded", "vLLM says that the adapter is loaded, but none of its slots has it"),
        ("the base is served", f"{HOLDS_OTHER} model.layers.0.mlp.down_proj (lora_A), "),
        ("alpha is halved", f"{HOLDS_OTHER} model.layers.0.mlp.down_proj (lora_B), "),
        ("q_proj is missing", f"{HOLDS_OTHER} model.layers.0.self_attn.q_proj (lora_A), "),
        ("another adapter is held", f"{HOLDS_OTHER} model.layers.0.mlp.down_proj (lora_A), "),
        ("two parts are exchanged", "model.layers.1.mlp.gate_proj (lora_B), model.layers.1.mlp.up_proj (lora_B);"),
    ],
)
@on_engine
async def test_an_adapter_that_the_engine_holds_wrongly_is_refused_and_gone(
    live: LiveEngine, fault: str, said: str
) -> None:
    weights, number = live.engine.weights, NUMBERS[fault]
    with pytest.raises(AdapterRefusedError) as refused:
        await weights.load(adapter(live, number, fault))
    assert said in str(refused.value)
    assert await live.engine._core.call_workers("list_loras") == [[]]
    right = adapter(live, number + 1)
    await weights.load(right)
    await weights.discard(right)


@on_engine
async def test_files_of_another_run_are_refused(live: LiveEngine) -> None:
    made = adapter(live, 90)
    other = Adapter(made.version, made.name, made.id, live.peft_folder(1), checksum_of(made.path))
    with pytest.raises(AdapterRefusedError, match="are not those that were verified: CRC-32"):
        await live.engine.weights.load(other)


@on_engine
async def test_no_adapter_that_is_right_is_refused(live: LiveEngine, tmp_path: Path) -> None:
    """Fifty of any rank, scale, magnitude, dtype and choice of modules."""
    chance = random.Random(5)
    for number in range(1, 51):
        made = random_adapter_of(live, tmp_path / str(number), number, chance)
        await live.engine.weights.load(made)
        await live.engine.weights.discard(made)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing is loaded", OTHER_WEIGHTS),
        ("a layer stays", OTHER_WEIGHTS),
        ("the base is served", OTHER_WEIGHTS),
        ("another adapter is held", OTHER_WEIGHTS),
        ("alpha is halved", OTHER_WEIGHTS),
        ("q_proj is missing", "self_attn.qkv_proj, model.layers.1.self_attn.qkv_proj are not the base"),
        ("an old adapter under the new name", "are not those that were verified: CRC-32"),
    ],
)
def test_merged_weights_that_are_wrong_are_refused_and_the_former_ones_come_back(
    merged: LiveEngine, fault: str, said: str
) -> None:
    weights, number = merged.engine.weights, NUMBERS[fault]

    async def check() -> None:
        first = merged.adapter(1, number)
        await weights.load(first)
        weights.activate(first)
        before = (await weights.verify(first, [TOKENS]))[0].logprobs
        with pytest.raises(AdapterRefusedError, match=re.escape(said)):
            await weights.load(adapter(merged, number + 1, fault))
        assert (await weights.verify(first, [TOKENS]))[0].logprobs == before

    merged.run(check())


def test_no_merged_weights_that_are_right_are_refused(merged: LiveEngine, tmp_path: Path) -> None:
    """Thirty of any rank, scale, magnitude, dtype and choice of modules, of which every third is taken back."""

    async def check() -> None:
        chance = random.Random(6)
        for number in range(30):
            made = random_adapter_of(merged, tmp_path / str(number), number, chance)
            await merged.engine.weights.load(made)
            if number % 3:
                merged.engine.weights.activate(made)
                assert 0 <= merged.engine.weights.survival["all"] < 2
            else:
                await merged.engine.weights.discard(made)

    merged.run(check())


def random_adapter_of(live: LiveEngine, folder: Path, number: int, chance: random.Random) -> Adapter:
    whole = load_file(live.peft_folder(1) / "adapter_model.safetensors")
    config = json.loads((live.peft_folder(1) / "adapter_config.json").read_text())
    modules = sorted({key.rpartition(".lora_")[0] for key in whole})
    write(folder, whole, config, chance.sample(modules, chance.randint(1, len(modules))), chance)
    return Adapter(number, f"right-{number}", 200_000_000 + number, folder, checksum_of(folder))


def write(
    folder: Path, whole: dict[str, torch.Tensor], config: dict, modules: list[str], chance: random.Random
) -> None:
    rank, magnitude = chance.randint(1, 8), 10 ** chance.uniform(-6, 2)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    tensors = {}
    for module in modules:
        (_, inputs), (outputs, _) = (whole[f"{module}.lora_{matrix}.weight"].shape for matrix in "AB")
        tensors[f"{module}.lora_A.weight"] = (magnitude * torch.randn(rank, inputs)).to(dtype)
        tensors[f"{module}.lora_B.weight"] = (magnitude * torch.randn(outputs, rank)).to(dtype)
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    settings = {
        "r": rank,
        "lora_alpha": chance.choice([1, 8, 17, 32]),
        "use_rslora": chance.random() < 0.3,
        "alpha_pattern": {chance.choice(kinds): 3} if chance.random() < 0.3 else {},
        "target_modules": kinds,
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
