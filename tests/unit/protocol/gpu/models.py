"""A model whose sizes can be worked out by hand, and runs of it."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from protocol.config.run import RunConfig

CONFIG = """{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64}"""

SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (0, 1)
        for name, shape in {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (16, 8),
            "mlp.up_proj": (16, 8),
            "mlp.down_proj": (8, 16),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }.items()
    },
}


def write_model(folder: Path, config: str = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    save_file({name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    return folder


def run_of(folder: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder.parent / "run"),
            "model": {"path": str(folder)},
            "dataset": {"path": "rows.jsonl", "max_prompt_tokens": 4},
            "rewards": {"functions": [{"function": "rewards.py:exact"}]},
            "sampling": {"num_generations": 3, "max_completion_length": 6},
            "pipeline": {"gpu": "shared", "max_staleness": 1},
            "lora": {"r": 2},
        }
        | sections
    )
