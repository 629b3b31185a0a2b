"""Greedy accuracy on held-out prompts, by plain transformers and PEFT: nothing of Slipstream takes part.

python -m examples.arithmetic.evaluate MODEL DATA [--adapter DIR]
"""

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()


def greedy_accuracy(
    model_path: Path, data_path: Path, adapter: Path | None = None, batch_size: int = 250, longest: int = 5
) -> float:
    """Share of rows {"prompt", "answer"} that the model answers exactly right."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    rows = [json.loads(line) for line in data_path.read_text(encoding="utf-8").splitlines()]
    right = 0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(answer == row["answer"] for answer, row in zip(answers, batch, strict=True))
    return right / len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--adapter", type=Path)
    arguments = parser.parse_args()
    print(greedy_accuracy(arguments.model, arguments.data, arguments.adapter))
