"""Greedy accuracy on held-out products, with and without a calculator, by plain transformers and PEFT.

python -m examples.calculator.evaluate MODEL DATA [--adapter DIR]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()

CALL = re.compile(r'<tool_call>{"name": "multiply", "arguments": {"a": (\d+), "b": (\d+)}}</tool_call><\|end\|>')


def greedy_accuracy(model_path: Path, data_path: Path, adapter: Path | None = None) -> tuple[float, float]:
    """Shares of rows answered right: in the first turn, and in the second after what the calculator said, or in the first."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    rows = [json.loads(line) for line in data_path.read_text(encoding="utf-8").splitlines()]
    prompts = [f"<|tools|>multiply<|user|>{row['prompt'][0]['content']}<|end|><|assistant|>" for row in rows]
    first = generate(model, tokenizer, prompts)
    calls = [CALL.fullmatch(text) for text in first]
    results = [int(call[1]) * int(call[2]) if call else None for call in calls]
    again = [
        prompt + text + f"<|tool|>{result}<|end|><|assistant|>"
        for prompt, text, result in zip(prompts, first, results, strict=True)
    ]
    second = generate(model, tokenizer, again)
    wanted = [f"{row['answer']}<|end|>" for row in rows]
    alone = sum(map(str.__eq__, first, wanted))
    helped = sum(text == want for text, want, call in zip(second, wanted, calls, strict=True) if call)
    return alone / len(rows), (alone + helped) / len(rows)


def generate(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return the greedy continuation of each prompt, with its end, of at most 16 tokens."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return [text.replace("<pad>", "") for text in texts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--adapter", type=Path)
    arguments = parser.parse_args()
    print(
        "alone {:.3f}, with a calculator {:.3f}".format(
            *greedy_accuracy(arguments.model, arguments.data, arguments.adapter)
        )
    )
