"""Build the base model of the guessing game: a tiny Qwen2 that plays both sides, the guesser badly.

    python -m examples.guessing.build_model OUTPUT_DIR [--seed 0]

Writes a Hugging Face model folder (safetensors, float32, a tokenizer with a chat template) and in it train.jsonl and eval.jsonl:
a row {"prompt": [{"role": "user", "content": "guess"}], "secret": 11} for each number.

Half of the guesses of its corpus are any number, and half one that the answers so far leave. Answers are always true: told the
number as its system prompt, the model says of a guess whether it is higher, lower or right, so that it can be a simulated user.
Nothing is downloaded.
"""

import argparse
import random
import time
from pathlib import Path

import torch

from examples.arithmetic.build_model import pretrain, save
from examples.chat_models import Part, chat_model, chat_tokenizer, corpus, loss_on
from examples.guessing.game import LARGEST, TURNS, Game

GAMES = 6000
WORDS = ["<|system|>", "<|user|>", "<|assistant|>", "guess", "higher", "lower", "right", *"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


Turns = list[tuple[str, str]]


def played(draw: random.Random, careless: float) -> tuple[int, Turns]:
    """Return the number of a game, and its guesses with what was said to them. `careless` is the share of guesses that are any
    number."""
    secret, low, high = draw.randint(1, LARGEST), 1, LARGEST
    game, turns = Game(secret), Turns()
    for _ in range(TURNS):
        guess = draw.randint(1, LARGEST) if draw.random() < careless else draw.randint(low, high)
        said, _, done = game.answer(str(guess))
        turns.append((str(guess), said))
        if done:
            break
        low, high = (max(low, guess + 1), high) if said == "higher" else (low, min(high, guess - 1))
    return secret, turns


def guesser(_secret: int, turns: Turns) -> list[Part]:
    parts: list[Part] = [("<|user|>guess<|end|>", False)]
    for guess, said in turns:
        parts += [("<|assistant|>", False), (f"{guess}<|end|>", True), (f"<|user|>{said}<|end|>", False)]
    return parts


def answerer(secret: int, turns: Turns) -> list[Part]:
    parts: list[Part] = [(f"<|system|>{secret}<|end|><|assistant|>guess<|end|>", False)]
    for guess, said in turns:
        parts += [(f"<|user|>{guess}<|end|><|assistant|>", False), (f"{said}<|end|>", True)]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--careless", type=float, default=0.5, help="share of guesses that are any number")
    args = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = chat_tokenizer(WORDS, TEMPLATE)
    model = chat_model(tokenizer)
    draw = random.Random(args.seed)
    games = [played(draw, args.careless) for _ in range(GAMES)]
    data = corpus(tokenizer, [side(*game) for game in games for side in (guesser, answerer)])
    pretrain(model, loss_on(model, lambda _step: data), args.steps, say_every=100)
    rows = [{"prompt": [{"role": "user", "content": "guess"}], "secret": secret} for secret in range(1, LARGEST + 1)]
    save(args.output, model, tokenizer, rows, rows)
    print(f"{args.output}: {model.num_parameters():,} parameters; {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
