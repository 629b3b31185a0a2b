"""`slipstream journal list`, `quarantine` and `lineage` list rows of the journal.

Guarantee: they read no body, so they are quick on a journal of any size, and their memory is bounded.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupFilter, GroupRow
from slipstream.tables import clock, number, size, span, span_of_steps, write_json, write_line, write_table


def list_groups(rows: Iterator[GroupRow], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            write_json(as_dict(row))
        return
    header = (
        "group", "state", "step", "version", "reward", "verdict", "tokens", "prompt", "reroll", "replays", "producer",
        "arrived",
    )  # fmt: skip
    table = (
        (
            row.lease_id, row.state, span(row.step, row.last_step), str(row.policy_version), number(row.reward),
            verdict(row), str(row.num_tokens), str(row.prompt_id), str(row.reroll), str(row.num_replays), row.producer,
            clock(row.accepted_at),
        )
        for row in rows
    )  # fmt: skip
    write_table(header, table, right="step version reward tokens prompt reroll replays")


def quarantine(reader: JournalReader, *, as_json: bool) -> None:
    groups = reader.rows(GroupFilter(state="quarantined"))
    if as_json:
        for row in groups:
            write_json({"kind": "group"} | as_dict(row))
        for frame in reader.refused_frames():
            write_json({"kind": "frame"} | asdict(frame) | {"head": frame.head.hex()})
        for letter in reader.dead_letters():
            write_json({"kind": "dead_letter"} | asdict(letter))
        return
    found = (
        (row.lease_id, span(row.step, row.last_step), str(row.prompt_id), str(row.policy_version), row.producer,
         clock(row.accepted_at))
        for row in groups
    )  # fmt: skip
    _section(
        "groups in whose step the trainer died too often",
        ("group", "died in step", "prompt", "version", "producer", "arrived"),
        found,
    )
    frames = (
        (clock(frame.received_at), size(frame.num_bytes), frame.head[:16].hex(), frame.reason)
        for frame in reader.refused_frames()
    )
    _section("frames that were refused", ("received", "size", "first bytes", "reason"), frames)
    letters = (
        (clock(letter.failed_at), str(letter.epoch), str(letter.prompt_id), str(letter.reroll), str(letter.attempts),
         letter.failure, letter.reason, letter.detail)
        for letter in reader.dead_letters()
    )  # fmt: skip
    _section(
        "dead letters (prompts without more leases)",
        ("when", "epoch", "prompt", "reroll", "attempts", "class", "reason", "detail"),
        letters,
    )


def lineage(reader: JournalReader, step: int) -> None:
    """Show which groups made optimizer step `step`; `JournalError` if the journal does not hold it."""
    batch = next(reader.batches(step), None)
    if batch is None or batch.step > step:
        raise JournalError(
            f"{reader.path} holds no groups of step {step}; `slipstream journal stats` shows which steps it holds"
        )
    started_from = reader.policy_at(batch.step - 1)
    fresh = [row for lease_id in batch.lease_ids[: batch.num_fresh] if (row := reader.row(lease_id)) is not None]
    again = [(use, row) for use in reader.uses(of_step=batch.step) if (row := reader.row(use.lease_id)) is not None]
    replayed = f", {len(again)} of them replayed" if again else ""
    iterations = "" if batch.step == batch.last_step else f", as all of {span_of_steps(batch.step, batch.last_step)}"
    open_end = "; it has not ended" if any(row.state == "claimed" for row in fresh) else ""
    write_line(f"step {step} trains {len(fresh) + len(again)} groups{replayed}{iterations}{open_end}")
    write_line()
    header = ("position", "use", "group", "prompt", "version", "staleness", "reward", "verdict", "tokens", "producer")
    trained = [(row.position, "first", row) for row in fresh] + [(use.position, "replayed", row) for use, row in again]
    rows = (
        (
            str(position), use, row.lease_id, str(row.prompt_id), str(row.policy_version),
            str(started_from.version - row.policy_version) if started_from else "-", number(row.reward), verdict(row),
            str(row.num_tokens), row.producer,
        )
        for position, use, row in trained
    )  # fmt: skip
    write_table(header, rows, right="position prompt version staleness reward tokens")
    write_line()
    made = reader.policy_at(step)
    if made is None or made.step != step:
        write_line("policy: none")
    else:
        write_line(f"policy: version {made.version}, sha256 {made.digest}, published {clock(made.published_at)}")


def verdict(row: GroupRow) -> str:
    """The verdict, with the number of successes among the completions that were scored."""
    return row.verdict if row.num_scored == 0 else f"{row.verdict} {row.num_successes}/{row.num_scored}"


def as_dict(row: GroupRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "crc"}


def _section(title: str, header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    first = next(rows, None)
    write_line(f"{title}: {'none' if first is None else ''}".rstrip())
    if first is not None:
        write_table(header, chain([first], rows), right="prompt version size epoch reroll attempts")
    write_line()
