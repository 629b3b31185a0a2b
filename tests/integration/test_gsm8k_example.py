"""The GSM8K example's own configuration and task file, on a local dataset and a small model of the same shape."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.gsm8k.task import boxed_once, number, right_answer, to_prompt
from tests.integration.models import byte_bpe_tokenizer
from tests.integration.pair import Daemon

ROWS = [
    {
        "question": f"Ann has {i} apples and buys {i + 1}. How many?",
        "answer": f"{i}+{i + 1}={2 * i + 1}\n#### {2 * i + 1}",
    }
    for i in range(24)
]


def test_rows_become_chat_prompts_with_the_bare_answer() -> None:
    row = to_prompt({"question": "How many?", "answer": "First 1,000.\n#### 1,250"})
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["answer"] == "1,250"


def test_rewards_by_hand() -> None:
    texts = ["so \\boxed{1,250}", "\\boxed{7} then \\boxed{$1250.00}", "1250", "\\boxed{12500}"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert right_answer(completions, answer=["1,250"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert boxed_once(completions) == [1.0, 0.0, 0.0, 1.0]
    assert number("costs $1,250.50 in all") == 1250.5
    assert number("none") is None


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_pair_runs_it(short_dir: Path) -> None:
    tokenizer = byte_bpe_tokenizer()
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
    model.save_pretrained(short_dir / "model")
    tokenizer.save_pretrained(short_dir / "model")
    (short_dir / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    # A random model never boxes a number; a third reward gives it something to learn from.
    (short_dir / "short.py").write_text(
        "def short(completions, **_):\n    return [-len(c[0]['content']) for c in completions]"
    )
    task = "examples/gsm8k/task.py"
    names = [f"{task}:right_answer", f"{task}:boxed_once", f"{short_dir}/short.py:short"]
    functions = json.dumps([{"function": name} for name in names])
    settings = {
        "run_dir": short_dir / "run",
        "model.path": short_dir / "model",
        "model.dtype": "float32",
        "dataset.path": short_dir / "gsm8k.jsonl",
        "dataset.name": "null",
        "rewards.functions": functions,
        "rewards.num_workers": 1,
        "sampling.max_completion_length": 16,
        "pipeline.groups_per_step": 2,
        "engine.max_num_seqs": 32,
        "engine.max_model_len": 512,
        "engine.enforce_eager": "true",
        "trainer.max_steps": 4,
    }
    arguments = ["--config", "examples/gsm8k/run.yaml"]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    producer = Daemon("producer.cli", short_dir / "producer.log", *arguments)
    trainer = Daemon("consumer.cli", short_dir / "trainer.log", *arguments)
    try:
        assert trainer.end(200) == 0, trainer.output[-3000:]
        assert producer.end() == 0, producer.output[-3000:]
    finally:
        producer.close()
        trainer.close()
    last = json.loads((short_dir / "run" / "steps.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4
    assert last["counts"]["trained"] == 8
    assert last["rewards/right_answer/mean"] == 0.0
    assert last["rewards/short/mean"] < 0
