"""The layer that a trial adapter changes is one of the text model, wherever files have others."""

import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream_extras.engine_server.inspection import write_trial_adapter


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


def test_a_folder_without_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Which `Server.run` waits out; those of `safetensors` are none."""
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((64, 64), np.float32)}, tmp_path / "model.safetensors")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_trial_adapter(tmp_path, {"r": 8, "target_modules": ["up_proj"]}, tmp_path / "trial")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
