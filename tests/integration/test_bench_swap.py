"""The benchmark of swaps runs from end to end, with a stand-in for vLLM; no number is judged."""

import asyncio
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import swap
from tests.scripted_engine import EngineWithoutWeights, NoWeights

pytestmark = pytest.mark.integration


class Llm:
    async def generate(self, *_: Any, **__: Any) -> Any:
        for _ in range(20):
            await asyncio.sleep(0.002)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])])

    async def pause_generation(self, **_: Any) -> None: ...

    async def resume_generation(self) -> None: ...


class Weights(NoWeights):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    async def load(self, adapter: Any) -> None:
        assert (adapter.path / "adapter_model.safetensors").stat().st_size > 1e6
        self.loaded.append(adapter.id)

    async def discard(self, adapter: Any) -> None:
        self.loaded.remove(adapter.id)


class Engine(EngineWithoutWeights):
    def __init__(self, config: Any, num_gpus: int) -> None:
        super().__init__(config)
        self._core = SimpleNamespace(llm=Llm(), call_workers=self._call_workers)
        self.weights: Weights = Weights()

    async def _call_workers(self, method: str, on: bool) -> None:
        assert method == "prove_by_bits"

    def shutdown(self) -> None:
        assert self.weights.loaded == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_writes_and_prints_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import producer.engine.engine

    monkeypatch.setattr(producer.engine.engine, "VllmEngine", Engine)
    monkeypatch.setattr(swap, "_AROUND_S", 0.1)
    forks = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
    swap.main(["--sizes", "1", "--repeat", "1", "--out", str(tmp_path / "swap.json")])
    swaps = json.loads((tmp_path / "swap.json").read_text())["swaps"]
    assert [one["way"] for one in swaps] == list(swap.WAYS)
    for one in swaps[:2]:
        parts = ("trainer_probe_s", "snapshot_s", "hash_s", "shelf_s", "transfer_s", "load_and_prove_s")
        assert all(one[part] >= 0 for part in parts)
        assert one["bytes"] > 1e6
        assert one["live_s"] >= one["snapshot_s"] + one["load_and_prove_s"]
    printed = capsys.readouterr().out
    assert all(f"   1 {way}" in printed for way in swap.WAYS)
