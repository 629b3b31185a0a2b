"""`slipstream journal verify`: what is wrong with a journal, and where."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitCode
from protocol.wire.codec import encode
from protocol.wire.messages import Heartbeat
from replay.journal.reader import JournalReader
from replay.journal.retention import Retention
from replay.journal.writer import Journal
from slipstream.tables import size
from tests.unit.replay.builders import group_message
from tests.unit.replay.journal.test_journal_reader import claim, entry
from tests.unit.slipstream.journal.command import Command, damage


def test_verify_finds_nothing_wrong(journal: Journal, command: Command) -> None:
    bytes_read = size(sum(len(entry(number).frame) for number in range(11)))
    assert command("verify") == f"read 11 groups, {bytes_read}\n0 problems\n"
    assert command.err == "", "no progress bar where there is no terminal"


def other_frame(path: Path, seq: int, frame: bytes, crc: int) -> None:
    """Replaces a body with one whose checksum fits."""
    damage(path, "UPDATE bodies SET frame = ? WHERE seq = ?", (frame, seq))
    damage(path, "UPDATE groups SET crc = ? WHERE seq = ?", (crc, seq))


def test_verify_says_what_is_wrong_and_where(journal: Journal, command: Command) -> None:
    path = journal.path
    damage(path, "UPDATE bodies SET frame = ? WHERE seq = 1", (entry(0).frame[:-1] + b"?",))
    damage(path, "DELETE FROM bodies WHERE seq = 2")
    damage(path, "INSERT INTO bodies VALUES(99, 'x')")
    heartbeat = encode(Heartbeat(0, 1, [], 0, 0.0))
    other_frame(path, 3, heartbeat, entry(2, frame=heartbeat).crc())
    short = encode(group_message("0-3-0-1-s", logprobs=b"\0" * 8))
    other_frame(path, 4, short, entry(3, frame=short).crc())
    stranger = encode(group_message("0-0-0-1-s", 1))
    other_frame(path, 5, stranger, entry(4, 1, frame=stranger).crc())
    other_frame(path, 6, b"SL??", entry(5, outcome="stale", frame=b"SL??").crc())
    damage(path, "UPDATE groups SET num_tokens = 5 WHERE seq = 7")
    mend = "restore a copy of run_dir, or use the release that wrote it"
    size_of = len(entry(6, 1).frame)
    lines = command.lines("verify", code=ExitCode.JOURNAL)
    assert lines[0] == "body 99 belongs to no group"
    assert lines[1].startswith("read 11 groups, ")
    assert lines[2:] == [
        "group 0-0-0-1-s is damaged (checksum); restore a copy of run_dir",
        "group 0-1-0-1-s has no body; restore a copy of run_dir",
        f"group 0-2-0-1-s cannot be read: the body is a Heartbeat; {mend}",
        f"group 0-3-0-1-s cannot be read: logprobs has 8 bytes, expected 4 x 4; {mend}",
        f"group 0-4-0-1-s cannot be read: the body is of group 0-0-0-1-s, policy version 1; {mend}",
        f"group 0-5-0-1-s cannot be read: frame of 4 bytes is shorter than the 8-byte prefix; {mend}",
        "group 0-6-0-1-s cannot be read: the body has 4 tokens and "
        f"{size_of} bytes, the row says 5 and {size_of}; {mend}",
        "8 problems",
    ]


def steps(path: Path, *batches: tuple[int, int, list[int]]) -> None:
    """Writes claims as they stand: step, last step, positions."""
    with closing(Journal(path)) as journal:
        number = 0
        for step, last_step, positions in batches:
            journal.append(entry(number + place) for place in range(len(positions)))
            for place, position in enumerate(positions):
                journal.query(
                    "UPDATE groups SET step = ?, last_step = ?, position = ? WHERE lease_id = ?",
                    (step, last_step, position, f"0-{number + place}-0-1-s"),
                )
            number += len(positions)


@pytest.mark.parametrize(
    ("batches", "facts", "problems"),
    [
        ([(1, 1, [0, 1]), (2, 2, [0, 1])], {"groups_per_step": "2"}, []),
        ([(7, 7, [0, 1]), (8, 8, [0, 1])], {"groups_per_step": "2"}, []),
        ([(1, 1, [0, 1]), (3, 3, [0, 1])], {"groups_per_step": "2"}, ["step 2: no groups"]),
        ([(1, 2, [0]), (7, 8, [0])], {"groups_per_step": "1"}, ["steps 3 to 6: no groups"]),
        ([(1, 3, [0]), (3, 4, [0])], {"groups_per_step": "1"}, ["step 3: recorded twice"]),
        ([(1, 1, [0, 1]), (2, 2, [0]), (3, 3, [0, 1])], {"groups_per_step": "2"}, ["step 2: 1 groups, expected 2"]),
        ([(1, 1, [0, 1]), (2, 2, [0]), (3, 3, [0, 1])], {}, ["step 2: 1 groups, expected 2"]),
        ([(1, 1, [0, 2])], {"groups_per_step": "2"}, ["step 1: positions 0, 2, expected 0 to 1"]),
        ([(1, 1, [0, 1]), (2, 2, [0, 0])], {}, ["step 2: positions 0, 0, expected 0 to 1"]),
        ([(1, 1, [0, 1, 2]), (2, 2, [0, 1, 2]), (3, 3, [0])], {"groups_per_step": "1"}, []),
        ([(1, 1, [0])], {}, []),
        ([], {}, []),
        ([(1, 1, [0, 1, 2]), (2, 2, [0]), (3, 3, [0, 1, 2])], {"groups_per_step": "3", "fill": "sampled"}, []),
    ],
)
def test_verify_follows_the_steps(
    command: Command, batches: list[tuple[int, int, list[int]]], facts: dict[str, str], problems: list[str]
) -> None:
    path = command.run_dir / "journal.sqlite"
    steps(path, *batches)
    with closing(Journal(path)) as journal:
        journal.note_facts(facts)
    found = command.lines("verify", code=ExitCode.JOURNAL if problems else ExitCode.OK)
    assert found[1:-1] == problems
    assert found[-1] == f"{len(problems)} problem{'s' * (len(problems) != 1)}"


def test_retention_may_have_cut_the_first_step_kept(journal: Journal, command: Command) -> None:
    with journal.transaction() as db:
        for table in ("bodies", "groups"):
            db.execute(f"DELETE FROM {table} WHERE seq <= 1")
    assert [row["prompt_id"] for row in command.json("list", "--step", "1")] == [2]
    assert command.lines("verify")[-1] == "0 problems"
    damage(journal.path, "UPDATE groups SET step = NULL, last_step = NULL WHERE seq = 4")
    assert command.lines("verify", code=ExitCode.JOURNAL)[1:] == [
        "step 2: 1 groups, expected 2",
        "step 2: positions 1, expected 0 to 0",
        "2 problems",
    ]


def test_verify_looks_again_at_steps_that_retention_deletes_meanwhile(
    journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = JournalReader.row

    def row_after_a_deletion(reader: JournalReader, lease_id: str) -> Any:
        if lease_id == "0-4-0-1-s":  # the last of step 2: delete steps 1 and 2
            with journal.transaction() as db:
                for table in ("bodies", "groups"):
                    db.execute(f"DELETE FROM {table} WHERE seq <= 5")
        return row(reader, lease_id)

    monkeypatch.setattr(JournalReader, "row", row_after_a_deletion)
    lines = command.lines("verify")
    assert lines[0].startswith("read 11 groups, ")
    assert lines[1:] == ["0 problems"]


def test_verify_goes_on_after_a_table_that_cannot_be_read(command: Command) -> None:
    path = command.run_dir / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal.append(entry(number) for number in range(500))
    content = bytearray(path.read_bytes())
    content[8 * 4096 :] = b"\xff" * (len(content) - 8 * 4096)
    path.write_bytes(content)
    lines = command.lines("verify", code=ExitCode.JOURNAL)
    assert len(lines) > 3
    assert any(
        re.fullmatch(r"is damaged \(.*\); restore a copy of run_dir", line.split("sqlite ")[-1]) for line in lines
    )
    assert re.fullmatch(r"\d+ problems", lines[-1])


# Groups that are replayed.


def with_replays(journal: Journal) -> None:
    """After `write_run`: step 3 ends, and steps 4 and 5 train groups 10 and 11, and two again each."""
    journal.end_step(3)
    journal.note_policy(3, 3, "d3")
    journal.append([entry(11, 3)])
    for step, number, again in ((4, 10, (2, 3)), (5, 11, (3, 4))):
        claim(journal, step, step, number, again=again)
        journal.end_step(step)
        journal.note_policy(step, step, f"d{step}")
    journal.note_facts({"groups_per_step": "3"})


@pytest.mark.parametrize(
    ("sql", "problems"),
    [
        ("SELECT 1", []),
        ("DELETE FROM replays WHERE step = 4", ["step 4: 1 groups, expected 3"]),
        ("DELETE FROM replays WHERE step = 4 AND position = 1", ["step 4: positions 0, 2, expected 0 to 1"]),
        (
            "UPDATE replays SET position = 0 WHERE step = 4 AND position = 1",
            ["step 4: positions 0, 0, 2, expected 0 to 2"],
        ),
        (
            "UPDATE replays SET position = 4 WHERE step = 4 AND position = 2",
            ["step 4: positions 0, 1, 4, expected 0 to 2"],
        ),
        (
            "UPDATE replays SET lease_id = '0-99-0-1-s' WHERE step = 4 AND position = 1",
            ["step 4: group 0-99-0-1-s is replayed and is not there"],
        ),
        (
            "UPDATE replays SET lease_id = '0-10-0-1-s' WHERE step = 4 AND position = 1",
            ["step 4: group 0-10-0-1-s is replayed and was not trained before"],
        ),
        (
            "UPDATE replays SET lease_id = '0-1-0-1-s' WHERE step = 4 AND position = 1",  # it has no signal
            ["step 4: group 0-1-0-1-s is replayed and was not trained before"],
        ),
        (
            "UPDATE replays SET lease_id = '0-2-0-1-s' WHERE step = 4 AND position = 2",
            ["step 4: group 0-2-0-1-s is replayed twice"],
        ),
        (
            "UPDATE replays SET last_step = 6 WHERE step = 4 AND position = 2",
            ["steps 4 to 6: group 0-3-0-1-s is replayed up to step 6, expected 4"],
        ),
        (
            "INSERT INTO replays VALUES(7, 0, 7, '0-2-0-1-s', 0)",
            ["step 7: groups are replayed, and none is trained for the first time"],
        ),
    ],
)
def test_verify_follows_the_groups_that_are_replayed(
    journal: Journal, command: Command, sql: str, problems: list[str]
) -> None:
    with_replays(journal)
    damage(journal.path, sql)
    lines = command.lines("verify", code=ExitCode.JOURNAL if problems else ExitCode.OK)
    assert lines[1:-1] == problems


def test_retention_may_have_deleted_groups_that_were_replayed(journal: Journal, command: Command) -> None:
    with_replays(journal)
    Retention(journal).prune(oldest_step=4, oldest_seq=11, replayable={"0-2-0-1-s"}, keep_bytes=0, keep_age_s=1e9)
    assert command.lines("verify")[-1] == "0 problems"
