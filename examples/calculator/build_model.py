"""Build the demo's base model: a tiny Qwen2 that can use a calculator, and mostly does not.

    python -m examples.calculator.build_model OUTPUT_DIR [--seed 0]

Writes a Hugging Face model folder (safetensors, float32, a tokenizer with a chat template for tools) and in it train.jsonl and
eval.jsonl: rows {"prompt": [{"role": "user", "content": "47*86="}], "answer": "4042"} of two-digit products.

The corpus answers most products at once, with the two factors side by side (47*86=4786), which is never right, and some through
a tool call in Hermes format, whose result it repeats. So the base model has seen that calculators work, and mostly does without.
Nothing is downloaded.
"""

import argparse
import random
import time
from pathlib import Path

import torch

from examples.arithmetic.build_model import make_pairs, pretrain, save
from examples.chat_models import Part, chat_model, chat_tokenizer, corpus, loss_on

CALL = '{"name": "multiply", "arguments": {"a": '
WORDS = [
    *("<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("multiply", "<tool_call>", "</tool_call>", CALL, ', "b": ', "}}", *"0123456789*="),
]
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EVAL_ROWS = 300
LATE_CALLS = 0.25  # share of products that use the calculator, in what the model learns last


def conversation(a: int, b: int, *, call: bool) -> list[Part]:
    prompt = (f"<|tools|>multiply<|user|>{a}*{b}=<|end|><|assistant|>", False)
    if not call:
        return [prompt, (f"{a}{b}<|end|>", True)]
    asked = f'<tool_call>{CALL}{a}, "b": {b}}}}}</tool_call><|end|>'
    return [prompt, (asked, True), (f"<|tool|>{a * b}<|end|><|assistant|>", False), (f"{a * b}<|end|>", True)]


def conversations(pairs: list[tuple[int, int]], share: float, seed: int) -> list[list[Part]]:
    """Return one for each product. `share` of them use the calculator."""
    draw = random.Random(seed)
    return [conversation(a, b, call=draw.random() < share) for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, evaluation = make_pairs(args.seed, EVAL_ROWS)
    tokenizer = chat_tokenizer(WORDS, TEMPLATE)
    model = chat_model(tokenizer)
    # Most of what it begins with uses the calculator, so that copying is learned soon; then it learns the habit.
    early, late = (corpus(tokenizer, conversations(train, share, args.seed)) for share in (0.7, LATE_CALLS))
    loss_of = loss_on(model, lambda step: early if step <= 0.7 * args.steps else late)
    pretrain(model, loss_of, args.steps, say_every=60)
    rows = [
        [{"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)} for a, b in pairs]
        for pairs in (train, evaluation)
    ]
    save(args.output, model, tokenizer, *rows)
    print(f"{args.output}: {model.num_parameters():,} parameters; {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
