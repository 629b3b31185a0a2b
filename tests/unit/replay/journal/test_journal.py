"""What a method wrote is there after any end of the process; when it raises, nothing of it happened."""

import contextlib
import shutil
import zlib
from pathlib import Path

import apsw
import numpy as np
import pytest

from protocol.errors import ExitCode, JournalError
from replay.journal.reader import JournalReader
from replay.journal.schema import DeadLetter, MicroBatchPlan
from replay.journal.writer import Journal
from tests.unit.replay.builders import claim, entry, lease_ids
from tests.unit.replay.journals import alter, everything, fill, rows

# What is written.


def test_a_new_journal_is_empty_durable_and_can_shrink(journal: Journal) -> None:
    assert (journal.facts(), journal.last_seq, journal.newest_version) == ({}, 0, -1)
    pragmas = ("journal_mode", "synchronous", "auto_vacuum", "user_version")
    assert [journal.query(f"PRAGMA {name}")[0][0] for name in pragmas] == ["wal", 2, 2, 2]


def test_rows_come_in_the_order_they_were_appended(journal: Journal) -> None:
    journal.append([entry(5), entry(3, outcome="no_signal", reward=None, producer="gpu-1", policy_version=7)])
    journal.append([])
    journal.append([entry(4, epoch=2, attempt=6, num_tokens=99, outcome="stale", frame=b"")])
    assert rows(journal) == [
        (1, "0-5-0-1-s", 0, 5, 1, "p", 0, "accepted", 0.5, 4, 17, None, None, None, 0, None),
        (2, "0-3-0-1-s", 0, 3, 1, "gpu-1", 7, "no_signal", None, 4, 17, None, None, None, 0, None),
        (3, "2-4-0-6-s", 2, 4, 6, "p", 0, "stale", 0.5, 99, 0, None, None, None, 0, None),
    ]
    assert journal.last_seq == 3
    assert journal.frames(["2-4-0-6-s", "0-5-0-1-s"]) == [b"", b"frame of prompt 5"]


def test_known_names_those_that_have_a_row(journal: Journal) -> None:
    journal.append([entry(0), entry(1, outcome="stale")])
    assert journal.known(lease_ids(0, 1, 2)) == set(lease_ids(0, 1))
    assert journal.known([]) == set()


def test_the_last_sequence_number_survives_the_deletion_of_its_row(journal: Journal) -> None:
    journal.append([entry(0), entry(1)])
    journal.query("DELETE FROM groups")
    assert journal.last_seq == 2
    journal.append([entry(2)])
    assert rows(journal, "seq") == [(3,)]


def test_a_claim_notes_the_steps_and_the_order_and_counts_the_tries(journal: Journal) -> None:
    journal.append([entry(0), entry(1), entry(2)])
    claim(journal, 5, 6, 2, 0)
    assert rows(journal, "step, last_step, position, tries") == [(5, 6, 1, 1), (None, None, None, 0), (5, 6, 0, 1)]
    claim(journal, 5, 6, 2, 0)
    assert rows(journal, "tries") == [(2,), (0,), (2,)]


def test_the_end_of_the_last_step_over_a_batch_clears_the_tries_of_its_groups_alone(journal: Journal) -> None:
    journal.append([entry(i) for i in range(4)])
    for index, (step, last_step) in enumerate([(1, 2), (3, 4), (5, 6)]):
        claim(journal, step, last_step, index)
    journal.end_step(3)
    assert rows(journal, "tries") == [(1,), (1,), (1,), (0,)]
    journal.end_step(4)
    assert rows(journal, "tries") == [(1,), (0,), (1,), (0,)]
    assert journal.newest_version == -1


def test_replays_have_rows_of_their_own_with_tries_that_end_with_the_last_step(journal: Journal) -> None:
    journal.append([entry(i) for i in range(4)])
    claim(journal, 1, 2, 0, 1)
    claim(journal, 3, 4, 2, again=(1, 0))
    claim(journal, 3, 4, 2, again=(1, 0))
    claim(journal, 5, 6, 3, again=(1,))
    uses = "SELECT step, position, last_step, lease_id, tries FROM replays ORDER BY step, position"
    one, zero = lease_ids(1, 0)
    assert journal.query(uses) == [(3, 1, 4, one, 2), (3, 2, 4, zero, 2), (5, 1, 6, one, 1)]
    assert rows(journal, "step, tries")[:2] == [(1, 1), (1, 1)], "their first training stays what it was"
    journal.end_step(3)
    assert [tries for *_, tries in journal.query(uses)] == [2, 2, 1]
    journal.end_step(4)
    assert [tries for *_, tries in journal.query(uses)] == [0, 0, 1]


def test_a_quarantined_group_keeps_its_tries_when_others_train_its_step(journal: Journal) -> None:
    journal.append([entry(0), entry(1)])
    claim(journal, 1, 1, 0)
    claim(journal, 1, 1, 0)
    journal.drop(lease_ids(0), "quarantined")
    claim(journal, 1, 1, 1)
    journal.end_step(1)
    assert rows(journal, "tries, dropped") == [(2, "quarantined"), (0, None)]


def test_a_try_that_is_taken_back_does_not_count_and_those_before_it_do(journal: Journal) -> None:
    journal.append([entry(i) for i in range(4)])
    for _ in range(2):
        claim(journal, 1, 2, 0, 1)
    claim(journal, 3, 4, 2, again=(0,))
    journal.drop(lease_ids(1), "quarantined")
    journal.undo_try(2)
    assert rows(journal, "tries") == [(1,), (2,), (1,), (0,)]
    journal.undo_try(4)
    assert rows(journal, "tries") == [(1,), (2,), (0,), (0,)]
    assert journal.query("SELECT tries FROM replays") == [(0,)]


def test_how_steps_were_cut_is_kept_and_a_step_taken_again_replaces_it(journal: Journal) -> None:
    journal.end_step(2, MicroBatchPlan(2, 64, b"state"))
    journal.end_step(5, MicroBatchPlan(5, 32, None))
    journal.end_step(2, MicroBatchPlan(2, 16, b"again"))
    found = [journal.newest_plan(step) for step in (1, 2, 4, 9)]
    assert found == [
        None,
        MicroBatchPlan(2, 16, b"again"),
        MicroBatchPlan(2, 16, b"again"),
        MicroBatchPlan(5, 32, None),
    ]
    with contextlib.closing(JournalReader(journal.path)) as reader:
        assert [reader.newest_plan(step) for step in (1, 2, 4, 9)] == found


def test_advantages_and_missing_rewards_are_read_back(journal: Journal) -> None:
    journal.append([entry(0), entry(1, missing=b"why")])
    journal.note_facts({"num_generations": "2"})
    claim(journal, 1, 2, 0, 1)
    values = np.array([1, -1, 0.5, -0.5], "<f4").tobytes()
    for step in (1, 2):
        journal.end_step(step, MicroBatchPlan(step, 64, None, values if step == 2 else b""))
    with contextlib.closing(JournalReader(journal.path)) as reader:
        assert [reader.missing_rewards(row) for row in reader.rows()] == [b"", b"why"]
        (batch,) = reader.batches()
        assert reader.advantages(batch, 2) == dict(zip(batch.lease_ids, [(1.0, -1.0), (0.5, -0.5)], strict=True))
        assert reader.advantages(batch, 1) == reader.advantages(batch._replace(lease_ids=batch.lease_ids[:1]), 2) == {}


def test_policies_are_kept_and_one_made_again_replaces_the_first(journal: Journal) -> None:
    journal.end_step(2)
    journal.note_policy(1, 2, "first")
    journal.end_step(4)
    journal.note_policy(2, 4, "second")
    journal.end_step(2)
    journal.note_policy(1, 2, "again")
    assert journal.query("SELECT version, step, digest FROM policies ORDER BY version") == [
        (1, 2, "again"),
        (2, 4, "second"),
    ]
    assert journal.newest_version == 2


def test_dead_letters_are_kept_with_the_beginning_of_a_long_story(journal: Journal) -> None:
    journal.add_dead_letter(DeadLetter(1, 7, 1, 3, "data", "reward_failed", "x" * 5000))
    found = journal.query("SELECT epoch, prompt_id, reroll, attempts, failure, reason, detail FROM dead_letters")
    assert found == [(1, 7, 1, 3, "data", "reward_failed", "x" * 4096)]


def test_of_refused_frames_the_newest_256_are_kept_and_the_beginning_of_long_ones(journal: Journal) -> None:
    journal.quarantine_frames([(f"reason {i}", b"f%d" % i) for i in range(200)])
    journal.quarantine_frames([(f"reason {i}", b"f%d" % i) for i in range(200, 299)])
    journal.quarantine_frames([("long", b"y" * 70_000)])
    found = journal.query("SELECT reason, num_bytes, frame FROM frames ORDER BY id")
    assert len(found) == 256
    assert found[0] == ("reason 44", 3, b"f44")
    assert found[-1] == ("long", 70_000, b"y" * 65_536)


# What survives.


def test_everything_is_there_after_an_end_at_any_moment(tmp_path: Path, journal: Journal) -> None:
    """What lies on the disk after each call, as a killed process would leave it."""
    states = []
    for index, call in enumerate(
        [lambda: fill(journal), lambda: journal.append([entry(9)]), lambda: journal.end_step(2)]
    ):
        call()
        states.append(everything(journal))
        copy = tmp_path / str(index)
        copy.mkdir()
        for file in tmp_path.glob("journal.sqlite*"):
            shutil.copy(file, copy)
        assert (copy / "journal.sqlite-wal").stat().st_size > 0
    for index, state in enumerate(states):
        with contextlib.closing(Journal(tmp_path / str(index) / "journal.sqlite")) as after:
            assert everything(after) == state


# What is refused.


@pytest.mark.parametrize("column", ["lease_id", "epoch", "prompt_id", "reroll", "attempt", "policy_version", "outcome"])
def test_a_changed_row_is_noticed_by_its_checksum(journal: Journal, column: str) -> None:
    journal.append([entry(0)])
    value = "0-0-0-2-s" if column == "lease_id" else "stale" if column == "outcome" else 3
    alter(journal.path, f"UPDATE groups SET {column} = ?", value)
    with pytest.raises(JournalError, match="is damaged "):
        journal.frames(["0-0-0-2-s" if column == "lease_id" else "0-0-0-1-s"])


def test_the_checksum_is_the_crc32_of_the_row_and_its_frame() -> None:
    assert entry(1, frame=b"abc").crc() == zlib.crc32(b"0-1-0-1-s 0 1 0 1 0 acceptedabc")


def test_a_group_that_is_not_there_is_named(journal: Journal) -> None:
    with pytest.raises(JournalError, match=r"does not hold group 0-8-0-1-s; `slipstream journal list` shows"):
        journal.frames(["0-8-0-1-s"])


def test_a_journal_of_another_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    alter(path, "PRAGMA user_version = 9")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="has journal schema 9, this release writes 2; use its release") as caught:
        Journal(path)
    assert caught.value.exit_code == ExitCode.JOURNAL
    assert path.read_bytes() == before
    alter(path, "PRAGMA user_version = 2")
    Journal(path).close()  # the lock was given back


def test_a_second_writer_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal.sqlite")
    for _ in range(2):
        with pytest.raises(JournalError) as caught:
            Journal(tmp_path / "journal.sqlite")
        assert str(caught.value) == (f"another rl-trainer is at work in {tmp_path}; stop it, or choose another run_dir")
    first.close()
    Journal(tmp_path / "journal.sqlite").close()


@pytest.mark.parametrize("content", [b"this is no database at all\n" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"is damaged \(.*\); see slipstream journal verify, or restore a copy"):
            Journal(path)
    assert path.read_bytes() == content


def test_a_group_appended_twice_is_a_bug_that_ends_the_journal_and_leaves_the_first(journal: Journal) -> None:
    journal.append([entry(0)])
    with pytest.raises(JournalError, match="UNIQUE"):
        journal.append([entry(1), entry(0)])
    with contextlib.closing(apsw.Connection(str(journal.path))) as reader:
        assert reader.execute("SELECT lease_id FROM groups").fetchall() == [("0-0-0-1-s",)]
