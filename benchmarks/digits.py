"""Shift each of six digits by what its place asks: a task that almost no completion gets right by luck.

    python -m benchmarks.digits OUTPUT_DIR

Guarantee: the base model writes six digits, each right with a chance of a third, nearly independently of the others: one
completion in 750 is right whole. Its likeliest digit is a copy, which is wrong at every place.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

SHIFTS = (3, 7, 1, 9, 4, 6)
RIGHT, COPIED = 0.3, 0.4  # the others are drawn from all ten
_ROWS, _HELD_OUT = 4000, 200


def answer_of(digits: str) -> str:
    """Return the digits, each plus the shift of its place, without a carry."""
    return "".join(str((int(digit) + shift) % 10) for digit, shift in zip(digits, SHIFTS, strict=True))


def digits_right(completion: str, answer: str) -> list[float]:
    """Return 1 for each digit of the answer that stands at its place, and 0 for each other one."""
    return [float(completion[place : place + 1] == digit) for place, digit in enumerate(answer)]


def all_right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward a completion with 1 if it is the answer, and with 0 otherwise."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def how_many_right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward a completion with the number of its right digits."""
    return [sum(digits_right(*both)) for both in zip(completions, answer, strict=True)]


def each_right(
    completions: list[str], completion_ids: list[Sequence[int]], answer: list[str], **_: object
) -> list[dict[str, list[tuple[int, float]]]]:
    """Reward each digit of a completion as a span, a token each."""
    return [
        {"tokens": list(enumerate(digits_right(completion, expected)[: len(ids)], start=1))}
        for completion, ids, expected in zip(completions, completion_ids, answer, strict=True)
    ]


def main(output: Path) -> None:
    import torch

    from examples.arithmetic.build_model import EOS, VOCAB, make_model, make_tokenizer, pretrain, save

    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [f"{number:06}" for number in random.Random(0).sample(range(10**6), _ROWS)]
    rows = [{"prompt": f"{digits}=", "answer": answer_of(digits)} for digits in chosen]
    model, zero, equals = make_model(), VOCAB["0"], VOCAB["="]

    def loss_of(_step: int) -> torch.Tensor:
        asked = torch.randint(10, (96, len(SHIFTS)))
        luck, guessed = torch.rand(asked.shape), torch.randint(10, asked.shape)
        written = torch.where(luck < RIGHT, (asked + torch.tensor(SHIFTS)) % 10, guessed)
        written = torch.where(luck > 1 - COPIED, asked, written)
        edge = torch.ones(len(asked), 1, dtype=torch.long)
        ids = torch.cat([asked + zero, edge * equals, written + zero, edge * EOS], dim=1)
        logits = model(ids[:, :-1], use_cache=False).logits[:, len(SHIFTS) :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, len(SHIFTS) + 1 :].flatten())

    pretrain(model, loss_of, 1500, say_every=250)
    save(output, model, make_tokenizer(VOCAB, max_length=64), rows[_HELD_OUT:], rows[:_HELD_OUT])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
