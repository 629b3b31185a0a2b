"""The proof by bits of what is on the stand-in GPU: the host waits once, however many tensors there are."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from producer.engine.adapter_worker import own_stream
from producer.engine.merged_worker import Merger
from producer.engine.published import PartlyServedError, PublishedAdapter, read_published
from producer.engine.swap_proof import AdapterProof
from tests.unit.producer.engine.lora_layers import Wrapped, manager_of, write_adapter
from tests.unit.producer.engine.test_merged_proof import NAMES, state_of
from tests.unit.producer.engine.test_merging import adapter, engine_model, prepare

if TYPE_CHECKING:
    from tests.gpu.stand_in.cuda import Gpu

pytestmark = pytest.mark.stand_in


def held(folder: Path, num_layers: int) -> tuple[dict[str, Any], AdapterProof, PublishedAdapter]:
    """As many layers, which hold the published adapter, in bfloat16."""
    names = [f"model.layers.{number}.mlp.down_proj" for number in range(num_layers)]
    layers: dict[str, Any] = {}
    for name in names:
        layers[name] = layer = Wrapped((2,), 4, torch.bfloat16)
        layer.lora_a_stacked = tuple(stacked.cuda() for stacked in layer.lora_a_stacked)
        layer.lora_b_stacked = tuple(stacked.cuda() for stacked in layer.lora_b_stacked)
        layer.put(0, [[1, 2, 3, 4], [0] * 4], [[2, 0], [6, 0]])
    pairs: Any = {name: ([[1.0, 2.0, 3.0, 4.0]], [[1.0], [3.0]]) for name in names}
    return layers, AdapterProof(manager_of(layers)), read_published(write_adapter(folder, pairs), None)


def num_waits(gpu: "Gpu", proof: AdapterProof, published: PublishedAdapter) -> int:
    before = gpu.num_syncs
    proof.compare(7, published)
    return gpu.num_syncs - before


def test_the_host_waits_once_for_all_slots(tmp_path: Path, gpu: "Gpu") -> None:
    waits = [num_waits(gpu, *held(tmp_path / str(count), count)[1:]) for count in (2, 24)]
    assert waits == [1, 1]


def test_a_slot_on_a_gpu_with_another_bit_is_refused(tmp_path: Path) -> None:
    layers, proof, published = held(tmp_path / "a", 3)
    with own_stream(torch.device("cuda", 0), torch.cuda.current_stream().record_event()):
        proof.compare(7, published)
    layers["model.layers.1.mlp.down_proj"].lora_b_stacked[0][1, 0, 1, 0] = 6.03125
    with pytest.raises(PartlyServedError, match=r"layers\.1\.mlp\.down_proj \(lora_B\);"):
        proof.compare(7, published)


def test_weights_merged_on_a_gpu_are_proved_there(tmp_path: Path) -> None:
    model = engine_model(torch.bfloat16).cuda()
    merging = Merger(model)
    prepare(merging, adapter(tmp_path / "a", *NAMES))
    assert all(evidence.sums.is_cuda for evidence in merging._evidence)
    merging.flip()
    assert state_of(merging) == ("done", str(tmp_path / "a"))
    assert merging.survival["o_proj"] == (800, 800)
    prepare(merging, adapter(tmp_path / "b", *NAMES))
    merging.flip()
    model.attn.o_proj.weight.data[1, 1] += 1
    state, said = state_of(merging)
    assert (state, "the weights of attn.o_proj are not" in said) == ("refused", True)
