"""The model that the parts have in common, a policy of it, and a run that teaches it.

Guarantee: built once per folder. Random weights in the shape of Qwen2.5-0.5B with a head of its own (0.6 B), or a small one for a
CPU. The head is drawn wide, so that distributions are not near uniform. The reward is the share of even token ids: every group
has signal.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu_check.place import Place
from examples.folders import build_once
from examples.gsm8k.make_rows import rows
from tests.integration.models import char_tokenizer

RANK = 16
_LARGE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
          "num_key_value_heads": 2, "vocab_size": 151936}  # fmt: skip
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "vocab_size": 256}  # fmt: skip
_REWARD = """def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
"""


def base(place: Place) -> Path:
    """The folder with `model`, `adapter`, `train.jsonl` and `rewards.py`."""
    folder = place.shared / f"base-{place.device}"
    build_once(folder, Path(__file__).read_bytes(), lambda partial: _build(partial, place.device))
    return folder


def sections(place: Place, run_dir: Path, mode: str, dtype: str, share: float | None = None) -> dict[str, Any]:
    """The configuration of a run of this model.

    Args:
        share: of the GPU's memory for the engine; None: what follows from the rest.
    """
    folder = base(place)
    length, steps = (16, 4) if place.on_cpu else (256, 8)
    return {
        "run_dir": str(run_dir),
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "dataset": {"path": str(folder / "train.jsonl")},
        "rewards": {"functions": [{"function": f"{folder}/rewards.py:even"}]},
        "sampling": {"num_generations": 4 if place.on_cpu else 8, "max_completion_length": length},
        "pipeline": {"groups_per_step": 4 if place.on_cpu else 16, "max_staleness": 2},
        "swap": {"mode": mode},
        "lora": {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"},
        "engine": {"max_model_len": 1024, "max_num_seqs": 64 if place.on_cpu else 256, "enforce_eager": place.on_cpu}
        | ({} if place.on_cpu or share is None else {"gpu_memory_utilization": share}),
        "trainer": {"max_steps": steps, "learning_rate": 1e-4, "gradient_checkpointing": False, "save_steps": 1000},
    }


def write_run(place: Place, run_dir: Path, mode: str, share: float | None = None) -> Path:
    """The same as a file in `run_dir`."""
    run_dir.mkdir(parents=True)
    path = run_dir / "run.yaml"
    path.write_text(yaml.safe_dump(sections(place, run_dir, mode, place.dtype, share)), encoding="utf-8")
    return path


def _build(folder: Path, device: str) -> None:
    small = device == "cpu"
    torch.manual_seed(0)
    shape = _SMALL if small else _LARGE
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    with torch.device(device):  # a GPU draws 0.6 B numbers at once
        model = Qwen2ForCausalLM(
            Qwen2Config(**shape, **tokens, tie_word_embeddings=False, max_position_embeddings=4096)
        )
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.1)
    save_with_policy(model, folder)
    lines = (json.dumps({"prompt": row["question"].lower()}) + "\n" for row in rows(512))
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "rewards.py").write_text(_REWARD, encoding="utf-8")


def save_with_policy(model: Any, folder: Path) -> None:
    """Write a model in its device's dtype with a tokenizer, and a random adapter of all its linear layers."""
    model.to(torch.float32 if model.device.type == "cpu" else torch.bfloat16).save_pretrained(folder / "model")
    char_tokenizer().save_pretrained(folder / "model")
    policy = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_" in name:
                value.normal_(0.0, 0.02)
    policy.save_pretrained(folder / "adapter")
