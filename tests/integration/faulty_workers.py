"""vLLM's workers as ours, with the fault that a file beside the adapter names.

Guarantee: faults are in what vLLM or a worker does with an adapter, never in the comparison. Without the file there is none.
"""

from pathlib import Path
from typing import Any

from producer.engine import merged_worker
from producer.engine.adapter_worker import AdapterWorker
from producer.engine.merged_worker import MergeWorker

FILE = "fault"
"""Name of the file in an adapter's folder: the fault, and the folder of another adapter."""


def fault_of(path: str | None) -> tuple[str, str]:
    file = Path(path or "") / FILE
    fault, _, other = file.read_text().partition("\n") if path and file.exists() else ("", "", "")
    return fault, other


def _missing(fault: str) -> str:
    """Return the kind of module that a worker leaves out; "" if none."""
    return fault.removesuffix(" is missing") if fault.endswith(" is missing") else ""


class FaultyLoading(AdapterWorker):
    """Of its faults, those of one worker are of the second."""

    def loading_prepare(self, request: tuple[str, int, str], checksum: int | None) -> None:
        name, number, path = request
        self._fault, other = fault_of(path)
        if self._fault == "a worker is left behind" and self.rank == 1:  # type: ignore[attr-defined]
            return
        if self._fault == "a worker takes another" and self.rank == 1:  # type: ignore[attr-defined]
            path = other
        if not hasattr(self, "_read_right"):
            self._read_right = self._loading._load
        self._loading._load = lambda request: self._read_wrong(request, other)
        super().loading_prepare((name, number, path), checksum)

    def loading_state(self) -> Any:
        return self._loading.advance(self._add)

    def _read_wrong(self, request: Any, other: str) -> Any:
        from vllm.lora.request import LoRARequest

        if self._fault == "another adapter is held":
            request = LoRARequest(request.lora_name, request.lora_int_id, other)
        adapter = self._read_right(request)
        if kind := _missing(self._fault):
            adapter.loras = {name: lora for name, lora in adapter.loras.items() if not name.endswith(kind)}
        if self._fault == "alpha is halved":
            for lora in adapter.loras.values():
                lora.scaling /= 2
        return adapter

    def _add(self, request: Any) -> bool:
        if self._fault == "nothing is loaded":
            return True
        added: bool = self.add_lora(request)  # type: ignore[attr-defined]
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        slot = manager.lora_index_to_id.index(request.lora_int_id)
        layer = manager.modules["model.layers.1.mlp.gate_up_proj"]
        if self._fault == "the base is served":
            for each in manager.modules.values():
                each.reset_lora(slot)
        if self._fault == "two parts are exchanged":
            gate, up = (stacked[slot] for stacked in layer.lora_b_stacked)
            gate[:], up[:] = up.clone(), gate.clone()
        if self._fault == "a worker has the other's part" and self.rank == 1:  # type: ignore[attr-defined]
            layer.lora_b_stacked[0][slot] = layer.lora_b_stacked[0][slot].roll(1, 1)
        return added


RIGHT_MERGE, RIGHT_FACTORS = merged_worker.merge, merged_worker.factors


class FaultyMerging(MergeWorker):
    """Of its faults, those of one worker are of the second."""

    _weights: Any

    def weights_prepare(self, path: str | None, checksum: int | None) -> None:
        self._fault, self._other = fault_of(path)
        if self._fault == "a worker is left behind" and self.rank == 1:  # type: ignore[attr-defined]
            return
        if self._fault == "a worker takes another" and self.rank == 1:  # type: ignore[attr-defined]
            path = self._other
        if self._fault == "an old adapter under the new name":
            path = self._other
        merged_worker.merge, merged_worker.factors = self._merge, self._factors
        super().weights_prepare(path, checksum)

    def weights_flip(self) -> dict[str, int]:
        if self._fault == "nothing is loaded":
            self._weights._installs = []
        if self._fault == "a layer stays":
            self._weights._installs.pop()
        return super().weights_flip()

    def _merge(self, base: Any, up: Any, *others: Any) -> Any:
        return RIGHT_MERGE(base, up / 2 if self._fault == "alpha is halved" else up, *others)

    def _factors(self, layer: Any, shape: Any, parts: Any) -> Any:
        if kind := _missing(self._fault):
            parts = [part for part in parts if part.name != kind]
        if self._fault == "the base is served":
            parts = []
        if self._fault == "another adapter is held":
            others = {(part.layer, part.name): part for part in self._weights._read(Path(self._other), None)}
            parts = [others[part.layer, part.name] for part in parts]
        up, down = RIGHT_FACTORS(layer, shape, parts)
        is_gate_up = any(part.layer == "model.layers.1.mlp.gate_up_proj" for part in parts)
        if self._fault == "a worker has the other's part" and self.rank == 1 and is_gate_up:  # type: ignore[attr-defined]
            up = up.roll(1, 0)
        return up, down
