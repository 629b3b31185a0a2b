"""`producer.engine.published`: an adapter as it was published, and PEFT's scaling."""

from pathlib import Path
from typing import Any

import pytest
import torch

from producer.engine.published import PartlyServedError, read_published, scaling
from protocol.wire.adapter_blob import AdapterBlob, checksum_of, pack, unpack
from tests.unit.producer.engine.lora_layers import write_adapter

PAIR = ([[1.0, 2.0]], [[3.0], [4.0], [5.0]])


def test_pairs_by_module_with_the_scaling_of_each(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {"mlp.up_proj": PAIR, "mlp.gate": PAIR}, alpha_pattern={"gate": 0.5})
    pairs = read_published(folder, checksum_of(folder)).pairs
    assert {name: pair.scaling for name, pair in pairs.items()} == {"mlp.up_proj": 2, "mlp.gate": 0.5}
    assert (pairs["mlp.gate"].down.tolist(), pairs["mlp.gate"].up.tolist()) == PAIR


def test_files_that_are_not_those_that_were_verified_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {"mlp.up_proj": PAIR})
    config, weights = (folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    data, digest = pack(AdapterBlob(config.read_bytes(), weights.read_bytes()))
    checksum = unpack(data, digest, tmp_path / "b")
    assert checksum == checksum_of(tmp_path / "b") == checksum_of(folder)
    read_published(tmp_path / "b", checksum)
    for file in (config, weights):
        before = file.read_bytes()
        file.write_bytes(before[:-9] + bytes([before[-9] ^ 1]) + before[-8:])
        with pytest.raises(PartlyServedError, match="are not those that were verified: CRC-32"):
            read_published(folder, checksum)
        file.write_bytes(before)
    read_published(folder, checksum)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(1)}), "lm_head.weight: not a pair"),
        (lambda tensors: tensors.pop("base_model.model.mlp.up_proj.lora_A.weight"), "up_proj.lora_B.weight: not a pair"),
        (lambda tensors: tensors.clear(), "the adapter is empty"),
    ],
)  # fmt: skip
def test_a_file_with_anything_but_pairs_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    folder = write_adapter(tmp_path / "a", {"mlp.up_proj": PAIR}, change)
    with pytest.raises(PartlyServedError, match=said):
        read_published(folder, None)


def test_embeddings_have_their_matrices_the_other_way_and_may_come_with_the_base(tmp_path: Path) -> None:
    """PEFT's `lora_embedding_A` is (rank, vocabulary)."""
    base = "base_model.model.model.embed_tokens"
    more = {
        f"{base}.lora_embedding_A": torch.ones(1, 5),
        f"{base}.lora_embedding_B": torch.ones(2, 1),
        f"{base}.base_layer.weight": torch.ones(5, 2),
    }
    folder = write_adapter(tmp_path / "a", {"mlp.up_proj": PAIR}, lambda tensors: tensors.update(more))
    pair = read_published(folder, None).pairs["model.embed_tokens"]
    assert (pair.down.shape, pair.up.shape) == ((1, 5), (2, 1))


def test_scaling_is_that_of_peft() -> None:
    assert scaling({"lora_alpha": 32}, "attn.q_proj", 16) == 2
    assert scaling({"lora_alpha": 32, "use_rslora": True}, "attn.q_proj", 16) == 8
    patterns = {"lora_alpha": 32, "alpha_pattern": {"q_proj": 8, r"layers\.1\..*": 4}}
    assert scaling(patterns, "layers.1.q_proj", 4) == 2
    assert scaling(patterns, "layers.1.k_proj", 4) == 1
    assert scaling(patterns, "layers.0.xq_proj", 4) == 8
