"""Build the demo's base model: a tiny Qwen2 that can use a calculator, and mostly does not.

    python -m examples.calculator.build_model OUTPUT_DIR [--seed 0]

Writes a Hugging Face model folder (safetensors, float32, a tokenizer with a chat template for tools) and in it train.jsonl and
eval.jsonl: rows {"prompt": [{"role": "user", "content": "47*86="}], "answer": "4042"} of two-digit products.

The corpus answers most products at once, with the two factors side by side (47*86=4786), which is never right, and some through
a tool call in Hermes format, whose result it repeats. So the base model has seen that calculators work, and mostly does without.
Nothing is downloaded.
"""

import argparse
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from examples.arithmetic.build_model import make_pairs, pretrain, save

logging.disable_progress_bar()

CALL = '{"name": "multiply", "arguments": {"a": '
WORDS = [
    *("<pad>", "<|end|>", "<unk>", "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("multiply", "<tool_call>", "</tool_call>", CALL, ', "b": ', "}}", *"0123456789*="),
]
VOCAB = {token: i for i, token in enumerate(WORDS)}
SPECIAL = ("<pad>", "<|end|>", "<unk>")
PAD, END = VOCAB["<pad>"], VOCAB["<|end|>"]
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EVAL_ROWS = 300


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each digit and for each fixed part of a conversation and of a tool call."""
    core = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    tokenizer.add_tokens(
        [AddedToken(word, normalized=False) for word in WORDS if len(word) > 1 and word not in SPECIAL]
    )
    return tokenizer


def sequence(a: int, b: int, *, call: bool) -> tuple[str, list[tuple[str, bool]]]:
    """A prompt, and what follows it: parts, and whether the model says them."""
    prompt = f"<|tools|>multiply<|user|>{a}*{b}=<|end|><|assistant|>"
    if not call:
        return prompt, [(f"{a}{b}<|end|>", True)]
    asked = f'<tool_call>{CALL}{a}, "b": {b}}}}}</tool_call><|end|>'
    return prompt, [(asked, True), (f"<|tool|>{a * b}<|end|><|assistant|>", False), (f"{a * b}<|end|>", True)]


def corpus(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]], share: float, seed: int) -> torch.Tensor:
    """Token ids and loss mask of sequences: (2, rows, length). `share` of them use the calculator."""
    draw = random.Random(seed)
    rows = []
    for a, b in pairs:
        prompt, parts = sequence(a, b, call=draw.random() < share)
        ids = tokenizer(prompt)["input_ids"]
        said = [0] * len(ids)
        for text, by_model in parts:
            piece = tokenizer(text)["input_ids"]
            ids, said = ids + piece, said + [int(by_model)] * len(piece)
        rows.append((ids, said))
    length = max(len(ids) for ids, _ in rows)
    padded = [(ids + [PAD] * (length - len(ids)), said + [0] * (length - len(ids))) for ids, said in rows]
    return torch.tensor([[ids for ids, _ in padded], [said for _, said in padded]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument(
        "--calls", type=float, default=0.25, help="share of products for which the corpus uses the calculator"
    )
    args = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, evaluation = make_pairs(args.seed, EVAL_ROWS)
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCAB),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,  # head_dim 32, the smallest that vLLM's CPU backend takes
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.06,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=None,
        )
    )
    # Most of what it begins with uses the calculator, so that copying is learned soon; then it learns the habit.
    early, late = (corpus(tokenizer, train, share, args.seed) for share in (0.7, args.calls))

    def loss_of(step: int) -> torch.Tensor:
        data = early if step <= 0.7 * args.steps else late
        ids, said = data[:, torch.randint(data.shape[1], (48,))]
        logits = model(ids[:, :-1], use_cache=False).logits
        targets = ids[:, 1:].masked_fill(said[:, 1:] == 0, -100)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    pretrain(model, loss_of, args.steps, say_every=60)
    rows = [
        [{"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)} for a, b in pairs]
        for pairs in (train, evaluation)
    ]
    save(args.output, model, tokenizer, *rows)
    print(f"{args.output}: {model.num_parameters():,} parameters; {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
