"""`python -m tests.faults.journal_writer FOLDER MODE SEED`: writes a journal and checkpoints for ever, and says what is safe.

Guarantee: `group ID` is on standard output after `Journal.append` returned, `checkpoint N` after `checkpoints.commit`
returned, and never before. MODE is full, or normal for a journal that does not wait for the disk.
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import apsw

from consumer.learn import checkpoints as checkpoints
from replay.journal.schema import JournalEntry
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.rerolls import Grade

PAYLOAD = "payload.bin"
_FRAME_BYTES = 6000
_PAUSE_S = 0.01
_CHECKPOINT_EVERY = 7  # appends


class NormalJournal(Journal):
    """Does not wait for the disk when it commits."""

    def _open(self) -> apsw.Connection:
        db = super()._open()
        db.pragma("synchronous", "normal")
        return db


KINDS = {"full": Journal, "normal": NormalJournal}


def made_up_entry(number: int, rng: random.Random, session: str = "w") -> JournalEntry:
    frame = rng.randbytes(rng.randint(_FRAME_BYTES // 10, _FRAME_BYTES))
    grade = Grade("mixed", 2, 1)
    return JournalEntry(LeaseId(Key(0, number), 1, session), "writer", 0, "accepted", 0.5, grade, 10, frame)


def _say(*lines: str) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


def _commit_checkpoint(folder: Path, step: int, rng: random.Random) -> None:
    staged = checkpoints.staging(folder) / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    payload = rng.randbytes(200_000)
    (staged / PAYLOAD).write_bytes(payload)
    state = {"step": step, "run_id": "r", "journal_seq": 0, "sha256": hashlib.sha256(payload).hexdigest()}
    checkpoints.commit(staged, state)


def main(folder: Path, mode: str, seed: int) -> None:
    rng = random.Random(seed)
    journal = KINDS[mode](folder / "journal.sqlite")
    number = 0
    for append in range(1, sys.maxsize):
        entries = [made_up_entry(number + i, rng) for i in range(rng.choice((1, 2, 4, 8)))]
        number += len(entries)
        journal.append(entries)
        _say(*(f"group {entry.lease_id}" for entry in entries))
        if append % _CHECKPOINT_EVERY == 0:
            step = append // _CHECKPOINT_EVERY
            _commit_checkpoint(folder / "checkpoints", step, rng)
            _say(f"checkpoint {step}")
            checkpoints.prune(folder / "checkpoints", keep=2)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
