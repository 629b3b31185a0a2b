"""Word problems in the schema of openai/gsm8k, made here: rows {"question": ..., "answer": "... #### 42"}.

    python examples/gsm8k/make_rows.py OUTPUT.jsonl [--rows 512] [--seed 0]

Two steps each, whole numbers, names and things drawn at random. Nothing is downloaded.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ["Ann", "Ben", "Chloe", "Dev", "Emil", "Fatima", "Grace", "Hugo"]
THINGS = ["apples", "books", "coins", "marbles", "pencils", "stamps"]


def shopping(name: str, thing: str, draw: random.Random) -> tuple[str, str, int]:
    price, number, paid = draw.randint(2, 9), draw.randint(2, 9), 100
    spent = price * number
    question = f"{name} buys {number} {thing} for ${price} each and pays with ${paid}. How much change does {name} get?"
    steps = f"The {thing} cost {number}*{price}=<<{number}*{price}={spent}>>{spent} dollars.\n"
    return (
        question,
        f"{steps}{name} gets {paid}-{spent}=<<{paid}-{spent}={paid - spent}>>{paid - spent} back.",
        paid - spent,
    )


def sharing(name: str, thing: str, draw: random.Random) -> tuple[str, str, int]:
    each, friends, kept = draw.randint(2, 9), draw.randint(2, 6), draw.randint(1, 9)
    given = each * friends
    question = (
        f"{name} gives {each} {thing} to each of {friends} friends and keeps {kept}. How many {thing} were there?"
    )
    steps = f"The friends get {each}*{friends}=<<{each}*{friends}={given}>>{given}.\n"
    return question, f"{steps}There were {given}+{kept}=<<{given}+{kept}={given + kept}>>{given + kept}.", given + kept


def weeks(name: str, thing: str, draw: random.Random) -> tuple[str, str, int]:
    start, per_day, days = draw.randint(60, 90), draw.randint(2, 5), draw.randint(2, 7)
    used = per_day * days
    question = f"{name} has {start} {thing} and uses {per_day} a day. How many are left after {days} days?"
    steps = f"{name} uses {per_day}*{days}=<<{per_day}*{days}={used}>>{used}.\n"
    return question, f"{steps}{start}-{used}=<<{start}-{used}={start - used}>>{start - used} are left.", start - used


STORIES: list[Callable[[str, str, random.Random], tuple[str, str, int]]] = [shopping, sharing, weeks]


def rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    made = []
    for _ in range(number):
        question, steps, answer = draw.choice(STORIES)(draw.choice(NAMES), draw.choice(THINGS), draw)
        made.append({"question": question, "answer": f"{steps}\n#### {answer}"})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows(args.rows, args.seed))
    args.output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
