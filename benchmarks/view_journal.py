"""A journal of any size for `rl-view`, with texts of words.

Guarantee: its rows, bodies and indexes are those that a trainer writes; only the commits are larger, and not synced one by one. A
group has four completions of 40 tokens and a prompt of 12, some 1.1 kB of text.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from protocol.wire.codec import encode
from protocol.wire.digests import tokenizer_digest
from protocol.wire.messages import Group
from replay.journal.tables import Entry
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.prompts.rerolls import Grade

COMPLETIONS, TOKENS, PROMPT_TOKENS = 4, 40, 12
GROUPS_PER_STEP, NUM_PROMPTS, NUM_PRODUCERS = 16, 50_000, 8
_WORDS, _AT_ONCE = 30_000, 2_000
_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "tu", "xa", "zo")


def word(number: int) -> str:
    """One of `_WORDS` words, which differ."""
    digits = []
    for _ in range(3):
        number, digit = divmod(number, len(_SYLLABLES))
        digits.append(_SYLLABLES[digit])
    return "".join(digits) + (str(number) if number else "")


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word(number): number for number in range(_WORDS)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_journal(folder: Path, num_groups: int) -> float:
    """Writes `folder/run` and `folder/model`; returns the seconds that it took."""
    started = time.monotonic()
    write_tokenizer(folder / "model")
    facts = {
        "run_id": f"bench-{num_groups}", "model_path": str((folder / "model").resolve()), "num_iterations": "1",
        "tokenizer_digest": tokenizer_digest(folder / "model"), "reward_names": '["correct"]', "reward_weights": "[1.0]",
    }  # fmt: skip
    with closing(Journal(folder / "run" / "journal.sqlite")) as journal:
        journal.note_facts(facts)
        journal.query("PRAGMA synchronous = OFF")
        made = _entries(np.random.default_rng(0), num_groups)
        while part := list(islice(made, _AT_ONCE)):
            journal.append(part)
        num_steps = num_groups // GROUPS_PER_STEP
        with journal.transaction() as db:
            step = f"(seq - 1) / {GROUPS_PER_STEP} + 1"
            place = f"position = (seq - 1) % {GROUPS_PER_STEP}"
            db.execute(f"UPDATE groups SET step = {step}, last_step = {step}, {place} WHERE outcome = 'accepted'")  # noqa: S608
            rows = [(version, version, f"{version:064x}", time.time()) for version in range(num_steps + 1)]
            db.executemany("INSERT INTO policies VALUES(?, ?, ?, ?)", rows)
    return time.monotonic() - started


def _entries(rng: np.random.Generator, num_groups: int) -> Iterator[Entry]:
    """Words are drawn as in a language: the n-th word 1/n as often as the first."""
    total = COMPLETIONS * TOKENS
    weights = 1 / np.arange(1, _WORDS + 1)
    drawn = rng.choice(_WORDS, 2**20, p=weights / weights.sum()).astype("<i4")
    logprobs = [np.log(rng.uniform(0.01, 1.0, total)).astype("<f4").tobytes() for _ in range(64)]
    lengths = np.full(COMPLETIONS, TOKENS, "<i4").tobytes()
    places = rng.integers(0, len(drawn) - total, num_groups)
    successes = rng.integers(0, COMPLETIONS + 1, num_groups).tolist()
    for number in range(num_groups):
        epoch, prompt = divmod(number, NUM_PROMPTS)
        lease = LeaseId(Key(epoch, prompt, 0), 1, "bench")
        solved, start = successes[number], int(places[number])
        rewards = (np.arange(COMPLETIONS) < solved).astype("<f4")
        truncated = bytes([int(number % 50 == 0), 0, 0, 0])
        message = Group(
            str(lease), number // GROUPS_PER_STEP, drawn[prompt : prompt + PROMPT_TOKENS].tobytes(), lengths,
            drawn[start : start + total].tobytes(), logprobs[number % 64], rewards.tobytes(), truncated, 2.0, 0.1,
        )  # fmt: skip
        has_signal = 0 < solved < COMPLETIONS
        grade = Grade("mixed" if has_signal else ("solved" if solved else "failed"), COMPLETIONS, solved)
        yield Entry(
            lease, f"producer-{number % NUM_PRODUCERS}", number // GROUPS_PER_STEP,
            "accepted" if has_signal else "no_signal", solved / COMPLETIONS, grade, total, encode(message),
        )  # fmt: skip
