"""A run with long completions, for `benchmarks/balance.py --run`: `python -m benchmarks.balance_run RUN_DIR`.

Guarantee: a real pair makes them: vLLM samples a small random Llama on the CPU at a high temperature, so that completions end by
themselves after some hundred tokens, more or less by the prompt; none is longer than `MAX_TOKENS`.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from examples.arithmetic.demo import run_pair
from tests.integration.models import byte_bpe_tokenizer

MAX_TOKENS = 1600
_WORDS = ["the", "sum", "of", "two", "and", "three", "is", "five", "what"]
_REWARD = '''
def share_of_e(completions, **_):
    """Of letters; it has nothing to do with lengths."""
    return [text.count("e") / max(1, len(text)) for text in completions]
'''


def build(folder: Path) -> None:
    tokenizer = byte_bpe_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # drawn wider than transformers does, so that what was said before matters
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_config(run_dir: Path, num_steps: int) -> Path:
    draw = random.Random(0)
    rows = [{"prompt": " ".join(draw.choices(_WORDS, k=draw.randint(4, 40)))} for _ in range(500)]
    (run_dir / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (run_dir / "rewards.py").write_text(_REWARD, encoding="utf-8")
    values = {
        "run_dir": str(run_dir),
        "model": {"path": str(run_dir / "model"), "dtype": "float32"},
        "dataset": {"path": str(run_dir / "prompts.jsonl")},
        "rewards": {"functions": [{"function": f"{run_dir}/rewards.py:share_of_e"}], "num_workers": 1},
        "sampling": {"num_generations": 8, "max_completion_length": MAX_TOKENS, "temperature": 1.5},
        "pipeline": {"groups_per_step": 8},
        "replay": {"keep_all": True, "max_disk_used": 0.99},
        "swap": {"mode": "merged"},
        "engine": {"max_model_len": 2048, "max_num_seqs": 64, "enforce_eager": True},
        "trainer": {"max_steps": num_steps, "learning_rate": 1e-6, "gradient_checkpointing": False},
    }
    file = run_dir / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="folder to make; what is there goes")
    parser.add_argument("--steps", type=int, default=16, help="of 64 completions (default: %(default)s)")
    options = parser.parse_args()
    run_dir = options.run_dir.resolve()
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    build(run_dir / "model")
    run_pair(run_dir, ["--config", str(write_config(run_dir, options.steps))], ["cpu", "cpu"])


if __name__ == "__main__":
    main()
