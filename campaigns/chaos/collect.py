"""The evidence of a run folder, as the checker wants it.

Guarantee: nothing here goes through the product's own reading of its files, except for the wire format of a group: the
journal is read as the SQLite database it is.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.chaos.evidence import digest_of_message, read
from campaigns.chaos.known import Answer, Batch, Evidence, Incarnation, Replay, Row, Rules
from protocol.wire.codec import decode
from protocol.wire.messages import Group

COLUMNS = "seq, lease_id, epoch, prompt_id, reroll, policy_version, outcome, step, last_step, dropped"
REPLAY_COLUMNS = "step, last_step, position, lease_id"


def collect(folder: Path, config: dict[str, Any]) -> Evidence:
    journal = folder / "run" / "journal.sqlite"
    checkpoint = newest_checkpoint(folder / "run" / "checkpoints")
    with contextlib.closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)) as db:
        rows = {row.lease_id: row for row in deleted_rows(folder)}
        rows |= {
            row.lease_id: row
            for row in rows_of(db.execute(f"SELECT {COLUMNS}, frame FROM groups JOIN bodies USING(seq)"))
        }
        replays = deleted_replays(folder)
        replays |= {Replay(*row) for row in db.execute(f"SELECT {REPLAY_COLUMNS} FROM replays")}
        dead = frozenset(db.execute("SELECT epoch, prompt_id, reroll FROM dead_letters").fetchall())
    ledger = checkpoint["ledger"]
    return Evidence(
        answers=answers(folder),
        incarnations=incarnations(folder),
        rows=rows,
        replays=frozenset(replays),
        dead=dead,
        final_step=checkpoint["step"],
        rules=rules(config),
        num_prompts=ledger["num_prompts"],
        epoch=ledger["epoch"],
        unsettled=frozenset((item[0], item[1], item[2]) for item in ledger["unsettled"]),
        deferred=frozenset((item[0], item[1], item[2]) for item in ledger["deferred"]),
        checkpoint_seq=checkpoint["journal_seq"],
    )


def rules(config: dict[str, Any]) -> Rules:
    pipeline, replay, reroll = (config[section] for section in ("pipeline", "replay", "reroll"))
    replays = replay["mode"] == "signal"
    return Rules(
        pipeline["max_staleness"],
        pipeline["sync_interval"],
        max_times_sampled=replay["max_times_sampled"] if replays else 1,
        max_age_versions=replay["max_age_versions"] if replays else 0,
        max_rerolls=reroll["max_attempts"],
        delay_versions=reroll["delay_versions"],
        cooldown_epochs=reroll["solved_cooldown_epochs"],
    )


def rows_of(found: Iterable[tuple[Any, ...]]) -> list[Row]:
    """From `COLUMNS` and the frame."""
    rows = []
    for values in found:
        *columns, frame = values
        message = decode(frame)
        assert isinstance(message, Group)
        rewards = np.frombuffer(message.rewards, "<f4").tolist()
        rows.append(Row(*columns, digest=digest_of_message(message), rewards=tuple(rewards)))
    return rows


def deleted_rows(folder: Path) -> list[Row]:
    """As the trainers wrote them down before their journal deleted them."""
    found = [line["row"] for path in trainer_logs(folder) for line in read(path) if line["what"] == "row"]
    return [Row(*values, rewards=tuple(rewards)) for *values, rewards in found]


def deleted_replays(folder: Path) -> set[Replay]:
    """The same of replays."""
    found = [line for path in trainer_logs(folder) for line in read(path) if line["what"] == "replays"]
    return {Replay(*values) for line in found for values in line["rows"]}


def answers(folder: Path) -> list[Answer]:
    return [
        Answer(path.stem, line["lease_id"], line["outcome"], line["digest"])
        for path in sorted(folder.glob("producer-*.jsonl"))
        for line in read(path)
        if line["what"] in ("ack", "nack")
    ]


def trainer_logs(folder: Path) -> list[Path]:
    """In the order in which the trainers were started."""
    return sorted(folder.glob("trainer-*.jsonl"))


def incarnations(folder: Path) -> list[Incarnation]:
    found = []
    for path in trainer_logs(folder):
        lines = read(path)
        starts = [line["step"] for line in lines if line["what"] == "start"]
        if not starts:
            continue  # it died before it trained anything
        batches = [
            Batch(line["step"], line["last_step"], tuple(map(tuple, line["groups"])), line["num_fresh"])
            for line in lines
            if line["what"] == "batch"
        ]
        ended = frozenset(line["step"] for line in lines if line["what"] == "step_end")
        found.append(Incarnation(starts[0], tuple(batches), ended))
    return found


def newest_checkpoint(checkpoints: Path) -> dict[str, Any]:
    """The pipeline state of the newest checkpoint."""
    states = [json.loads(file.read_text()) for file in checkpoints.glob("checkpoint-*/pipeline_state.json")]
    newest: dict[str, Any] = max(states, key=lambda state: state["step"])
    return newest


def surviving(logs: list[list[dict[str, Any]]], what: str, value: str) -> dict[int, str]:
    """By step, what the surviving lineage's trainers noted: the digest of a policy, or of a checkpoint's weights."""
    result: dict[int, str] = {}
    for lines in logs:
        starts = [line["step"] for line in lines if line["what"] == "start"]
        if starts:
            result = {step: digest for step, digest in result.items() if step <= starts[0]}
        result |= {line["step"]: line[value] for line in lines if line["what"] == what}
    return result
