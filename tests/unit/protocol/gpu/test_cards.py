"""The cards that a run fits, for known shapes and for a model of 1,704 parameters."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.config.loader import load_config
from protocol.gpu import cards
from protocol.gpu.cards import CARDS, fits, memory_table
from protocol.gpu.model_files import ModelShape
from protocol.gpu.weights import Weight
from tests.unit.protocol.gpu.models import run_of, write_model

EXAMPLE = Path(__file__).parents[4] / "examples" / "gsm8k"


def weights(hidden: int, inner: int, layers: int, kv: int, vocab: int, *, tied: bool) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (vocab, hidden), 16)
    yield Weight("model.norm.weight", (hidden,), 16)
    if not tied:
        yield Weight("lm_head.weight", (vocab, hidden), 16)
    linear = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    linear |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(layers):
        for name, shape in linear.items():
            yield Weight(f"model.layers.{layer}.{name}_proj.weight", shape, 16)
            if name in "qkv":
                yield Weight(f"model.layers.{layer}.{name}_proj.bias", shape[:1], 16)
        for norm in (1, 2):
            yield Weight(f"model.layers.{layer}.norm{norm}.weight", (hidden,), 16)


def qwen(hidden: int, inner: int, layers: int, kv: int, vocab: int, *, tied: bool) -> ModelShape:
    found = tuple(weights(hidden, inner, layers, kv, vocab, tied=tied))
    return ModelShape(found, hidden, inner, layers, hidden, kv, vocab, 32768)


SHAPES = {
    "Qwen2.5-0.5B": (qwen(896, 4864, 24, 128, 151936, tied=True), 494_032_768),
    "Qwen2.5-1.5B": (qwen(1536, 8960, 28, 256, 151936, tied=True), 1_543_714_304),
    "Qwen2.5-7B": (qwen(3584, 18944, 28, 512, 152064, tied=False), 7_615_616_512),
}
"""Shapes of their config.json, and the published numbers of parameters."""
SEVEN = SHAPES["Qwen2.5-7B"][0]


def example(*settings: str) -> Any:
    return load_config(str(EXAMPLE / "run.yaml"), list(settings))


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_the_example_is_what_is_computed(name: str) -> None:
    model, num_parameters = SHAPES[name]
    assert sum(weight.num_elements for weight in model.weights) == num_parameters
    rows = []
    for cells in fits(example(), model).values():
        starts, roomy = CARDS[cells.count("no")], CARDS[len(CARDS) - cells.count("yes")]
        rows.append(f"{starts}" if starts == roomy else f"{starts} ({roomy})")
    assert f"| {name} | {' | '.join(rows)} |" in (EXAMPLE / "README.md").read_text()


def test_a_card_for_the_trainer_alone() -> None:
    """The base has 14.19 GiB and the adapter 1.20. Of 16 GiB CUDA leaves 14.77, of 24 GiB 22.53."""
    assert fits(example(), SEVEN)["own, trainer"][:2] == ["no", "part"]
    in_four_bits = fits(example("model.quantization=nf4"), SEVEN)
    assert in_four_bits["own, trainer"][0] == "part"
    assert set(in_four_bits["turns"]) == {"no"}, "a quantized base does not leave the GPU"


def test_the_engines_share_is_for_the_layout_that_is_configured() -> None:
    assert fits(example(), SEVEN)["shared"][-1] == "yes"
    shared, capped = example("pipeline.gpu=shared"), example("engine.gpu_memory_utilization=0.3")
    assert set(fits(shared, SEVEN)["shared"]) == {"no"}, "0.9 of 141 GiB leave 8.4 GiB to the trainer"
    assert fits(capped, SEVEN)["own, engine"] == ["no"] * 4 + ["part"] * 2 + ["yes"]


def test_what_a_run_of_few_rows_and_configured_checkpointing_has_room_for() -> None:
    """256 rows of 1,024 tokens take 14 GiB, 8 of them 0.44. A pass of 4,096 tokens takes 28 GiB, or 2.6 with checkpointing."""
    assert fits(example(), SEVEN)["own, engine"][1] == "part"
    assert fits(example("engine.max_num_seqs=8"), SEVEN)["own, engine"][1] == "yes"
    assert fits(example(), SEVEN)["own, trainer"][2] == "part"
    assert fits(example("trainer.gradient_checkpointing=true"), SEVEN)["own, trainer"][2] == "yes"


def test_whole_weights_on_cards() -> None:
    """7,615,616,512 weights take 113.5 GiB with Adam of float32, and in a pass 14.2 more; Adam of 8 bits takes 74.0 in place of
    the former. Of 96 GiB CUDA leaves 92.4, of 141 GiB 136.0."""
    found, small = fits(example("lora=null"), SEVEN), fits(example("lora=null", "trainer.optim=adamw_8bit"), SEVEN)
    assert found["own, trainer"] == ["no"] * 6 + ["part"]
    assert small["own, trainer"] == ["no"] * 5 + ["part"] * 2
    assert found["own, engine"] == ["no", "part"] + ["yes"] * 5, "as with an adapter"
    assert found["turns"] == found["own, trainer"], "where the trainer has all of the card in its turn"


def test_whole_weights_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 113.5 GiB four ranks have 28.4 each. In a pass 1,089,998,336 weights around 28 layers take 12.2, and the layers 2.2."""
    found = fits(example("lora=null"), SEVEN, 4)
    assert found == {
        "own, trainer": ["no"] * 3 + ["part"] * 3 + ["yes"],
        "own, engine": fits(example("lora=null"), SEVEN)["own, engine"],
    }
    monkeypatch.setattr(cards, "folder_on_disk", lambda *_: Path("seven"))
    monkeypatch.setattr(cards, "model_shape", lambda _: SEVEN)
    line = list(memory_table(example("lora=null"), "0,1,2,3", 4))[1]
    assert re.findall(r"[\d.]+", line)[:3] == ["0.0", "28.4", "16384"]


@pytest.mark.parametrize(("optimizer", "trained"), [("adamw_torch", "113.5"), ("sgd", "56.7"), ("adamw_8bit", "74.0")])
def test_the_line_of_whole_weights(monkeypatch: pytest.MonkeyPatch, optimizer: str, trained: str) -> None:
    monkeypatch.setattr(cards, "folder_on_disk", lambda *_: Path("seven"))
    monkeypatch.setattr(cards, "model_shape", lambda _: SEVEN)
    lines = list(memory_table(example("lora=null", f"trainer.optim={optimizer}"), "0"))
    assert re.findall(r"[\d.]+", lines[1])[:3] == ["0.0", trained, "16384"]
    assert re.findall(r"[\d.]+", lines[2])[:2] == ["14.2", "0.0"], "an engine without LoRA slots"
    assert re.findall(r"[\d.]+", lines[3]) == ["1.4"], "20 bytes for each of 76,156,165 weights"
    assert len(list(memory_table(example(), "0"))) == len(lines) - 1, "an adapter is in a slot"


def test_lines(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    lines = list(memory_table(run_of(folder, pipeline={}), "0"))
    numbers = [re.findall(r"[\d.]+", line) for line in lines[1:4]]
    assert numbers[0] == ["0.0", "0.0", "16384", "0.0", "0.0"]
    assert numbers[1] == ["0.0", "0.0", "64", "0.0", "48", "10", "0.0"]  # 16 groups of 3
    assert numbers[2] == [str(card) for card in CARDS]
    assert [line.split().count("yes") for line in lines[4:8]] == [len(CARDS)] * 4


def test_no_table_without_a_gpu_or_a_model(tmp_path: Path) -> None:
    assert list(memory_table(run_of(write_model(tmp_path / "model")), "cpu")) == []
    [line] = memory_table(run_of(tmp_path / "elsewhere"), "0")
    assert str(tmp_path / "elsewhere") in line
