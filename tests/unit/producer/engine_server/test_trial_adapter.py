"""The layer that a trial adapter changes is one of the text model, wherever files have others."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from producer.engine_server.trial_adapter import write_trial_adapter


def test_a_tower_that_sees_images_is_left_out(tmp_path: Path) -> None:
    """Both have modules of this name, and vLLM applies no adapter to a tower."""
    layer, lora = np.zeros((6, 4), np.float32), {"r": 2, "target_modules": ["up_proj"]}
    save_file({"model.visual.blocks.0.mlp.up_proj.weight": layer}, tmp_path / "model-1.safetensors")
    save_file({"model.language_model.layers.0.mlp.up_proj.weight": layer}, tmp_path / "model-2.safetensors")
    write_trial_adapter(tmp_path, lora, tmp_path / "trial")
    module = "base_model.model.model.language_model.layers.0.mlp.up_proj"
    assert set(load_file(tmp_path / "trial" / "adapter_model.safetensors")) == {
        f"{module}.lora_A.weight",
        f"{module}.lora_B.weight",
    }
