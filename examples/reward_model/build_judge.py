"""Build a reward model for the demo's sums: a tiny Qwen2 with one label that tells right sums from careless ones.

    python -m examples.reward_model.build_judge OUTPUT_DIR [--steps 800]

Writes a Hugging Face folder of a sequence-classification model (float32, character tokenizer). Its logit is high for
"37+45=82" and low for "37+45=72". Nothing is downloaded.
"""

import argparse
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from transformers.utils import logging

from examples.arithmetic.build_model import EOS, PAD, VOCAB, careless, make_pairs, make_tokenizer

logging.disable_progress_bar()
_LENGTH = 9  # "99+99=198"


def encode(sums: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and attention mask of sums (a, b, answer)."""
    ids = torch.full((len(sums), _LENGTH), PAD)
    for row, (a, b, answer) in enumerate(sums):
        tokens = [VOCAB[letter] for letter in f"{a}+{b}={answer}"]
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids, (ids != PAD).long()


def wrong(a: int, b: int, draw: random.Random) -> int:
    """The careless answer, or one that is off by a little."""
    answer = careless(a, b)
    return answer if answer != a + b and draw.random() < 0.5 else a + b + draw.choice((-10, -2, -1, 1, 2, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = random.Random(0)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=len(VOCAB),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.06,
            num_labels=1,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )
    train, held_out = make_pairs(seed=0)

    def batch(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = [draw.random() < 0.5 for _ in pairs]
        sums = [(a, b, a + b if right else wrong(a, b, draw)) for (a, b), right in zip(pairs, labels, strict=True)]
        return *encode(sums), torch.tensor(labels, dtype=torch.float32)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, args.steps + 1):
        ids, mask, labels = batch(draw.sample(train, 128))
        logits = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        ids, mask, labels = batch(held_out)
        right = ((model(input_ids=ids, attention_mask=mask).logits[:, 0] > 0) == (labels > 0.5)).float().mean().item()
    model.save_pretrained(args.output)
    make_tokenizer(VOCAB, max_length=64).save_pretrained(args.output)
    print(f"{args.output}: tells right from wrong in {right:.3f} of {len(held_out)} held-out sums")


if __name__ == "__main__":
    main()
