"""Examples run as their users would run them, with a small local model in place of the one from the hub."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from protocol.runtime import json_lines as rotated_lines
from tests.integration.engines import NUM_BLOCKS
from tests.integration.models import CHAT_TEMPLATE
from tests.integration.pair import Daemon, end_well

SMALL = {
    "model.dtype": "float32",
    "rewards.num_workers": 1,
    "sampling.num_generations": 4,
    "pipeline.groups_per_step": 2,
    "pipeline.fill": "full",
    "engine.max_num_seqs": 32,
    "engine.max_model_len": 512,
    "engine.enforce_eager": "true",
    "engine.num_gpu_blocks_override": NUM_BLOCKS,
    "trainer.max_steps": 2,
}


def word_model(folder: Path, words: list[str]) -> Path:
    """A random model that says these words and nothing else, and knows no other; it has a chat template."""
    special = ["<pad>", "<|end|>", "<unk>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *words])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|end|>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_example(folder: Path, config: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the pair to its end and returns the lines of steps.jsonl."""
    arguments = ["--config", config]
    for key, value in (SMALL | {"run_dir": folder / "run"} | settings).items():
        arguments += ["--set", f"{key}={value}"]
    producer = Daemon("producer.app.cli", folder / "producer.log", *arguments)
    trainer = Daemon("consumer.app.cli", folder / "trainer.log", *arguments)
    try:
        end_well(trainer, producer)
    finally:
        producer.close()
        trainer.close()
    return rotated_lines.read(folder / "run" / "steps.jsonl")
