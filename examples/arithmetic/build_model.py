"""Build the demo's base model: a tiny Qwen2, briefly pre-trained on careless sums.

    python -m examples.arithmetic.build_model OUTPUT_DIR [--seed 0]

Writes a Hugging Face model folder (safetensors, float32, character tokenizer) and in it
train.jsonl and eval.jsonl: rows {"prompt": "37+45=", "answer": "82"} of two-digit sums. The
500 eval rows are used neither for the pre-training here nor in train.jsonl.

The corpus is careless: where a sum carries from the ones to the tens, it forgets the carry
most of the time (37+45=72). So the base model writes every sum well, has seen carries done
right, but mostly answers without: it is right on about 60 % of the sums. Reinforcement
learning, whose reward knows the true answer, has to teach it to carry. Nothing is downloaded.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

VOCAB = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
PAD, EOS = VOCAB["<pad>"], VOCAB["<eos>"]
PROMPT, LENGTH = 6, 10  # "99+99=", and with it "198" and <eos>
EVAL_ROWS = 500


def make_tokenizer(vocabulary: dict[str, int], max_length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each character."""
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    num_words: int = len(VOCAB), *, inner: int = 384, length: int = 64, pad: int = PAD, eos: int = EOS
) -> Qwen2ForCausalLM:
    """Make a model of so many words, by default those of `VOCAB`, with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=num_words,
            hidden_size=128,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=4,  # head_dim 32, the smallest that vLLM's CPU backend takes
            num_key_value_heads=4,
            max_position_embeddings=length,
            initializer_range=0.06,
            tie_word_embeddings=True,
            pad_token_id=pad,
            eos_token_id=eos,
            bos_token_id=None,
        )
    )


def make_pairs(seed: int, num_held_out: int = EVAL_ROWS) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Shuffle all two-digit pairs and return those to train on and those to evaluate on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[num_held_out:], pairs[:num_held_out]


def careless(a: int, b: int) -> int:
    """a + b without the carry from the ones to the tens."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def encode(pairs: list[tuple[int, int]], answer: Callable[[int, int], int]) -> torch.Tensor:
    """Token ids of whole sums, right-padded: (len(pairs), LENGTH)."""
    ids = torch.full((len(pairs), LENGTH), PAD)
    for i, (a, b) in enumerate(pairs):
        tokens = [VOCAB[c] for c in f"{a}+{b}={answer(a, b)}"] + [EOS]
        ids[i, : len(tokens)] = torch.tensor(tokens)
    return ids


@torch.no_grad()
def greedy_accuracy(model: Qwen2ForCausalLM, ids: torch.Tensor) -> float:
    """Share of rows answered right greedily (the argmax is right at every answer place)."""
    guess = model(ids[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].argmax(-1)
    want = ids[:, PROMPT:]
    return ((guess == want) | (want == PAD)).all(1).float().mean().item()


def pretrain(model: Qwen2ForCausalLM, loss_of: Callable[[int], torch.Tensor], num_steps: int, say_every: int) -> None:
    """Takes `num_steps` steps, each on what `loss_of` says of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 50, 2 * (1 - i / num_steps)))
    for step in range(1, num_steps + 1):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % say_every == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def save(
    folder: Path,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: list[dict[str, Any]],
    evaluation: list[dict[str, Any]],
) -> None:
    """Writes a Hugging Face model folder, and the rows in it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, rows in (("train", train), ("eval", evaluation)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--careless", type=float, default=0.6, help="share of forgotten carries")
    args = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, evaluation = make_pairs(args.seed)
    tokenizer = make_tokenizer(VOCAB, max_length=64)
    model = make_model()
    right, wrong = encode(train, lambda a, b: a + b), encode(train, careless)

    def careless_loss(_step: int) -> torch.Tensor:
        pick = torch.randint(len(train), (96,))
        forget = torch.rand(len(pick), 1) < args.careless
        ids = torch.where(forget, wrong[pick], right[pick])
        logits = model(ids[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), ignore_index=PAD)

    pretrain(model, careless_loss, args.steps, say_every=150)
    truth, habit = encode(evaluation, lambda a, b: a + b), encode(evaluation, careless)
    rows = [[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs] for pairs in (train, evaluation)]
    save(args.output, model, tokenizer, *rows)
    print(
        f"{args.output}: {model.num_parameters():,} parameters; on {len(evaluation)} held-out "
        f"sums the greedy answer is right for {greedy_accuracy(model, truth):.3f}, carelessly "
        f"so for {greedy_accuracy(model, habit):.3f}; {time.monotonic() - started:.1f} s"
    )


if __name__ == "__main__":
    main()
