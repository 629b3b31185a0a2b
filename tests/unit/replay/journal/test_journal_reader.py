"""The journal as its readers see it: beside a live writer, after a killed one, whole and damaged."""

import shutil
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import JournalError
from protocol.wire.codec import decode, encode
from replay.journal.reader import JournalReader
from replay.journal.recovery import recover
from replay.journal.schema import STATES, DeadLetter, GroupFilter, GroupRow, JournalEntry, RecordedBatch
from replay.journal.writer import Journal
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import entry as an_entry
from tests.unit.replay.builders import group_message
from tests.unit.replay.journals import alter


def entry(number: int, version: int = 0, reroll: int = 0, **changes: Any) -> JournalEntry:
    """Group `0-NUMBER-REROLL-1-s` of two completions: [3, 4, 5] and [6], rewards 0 and 1."""
    frame = encode(group_message(f"0-{number}-{reroll}-1-s", version))
    return an_entry(number, **({"reroll": reroll, "policy_version": version, "frame": frame} | changes))


def ids(numbers: Iterable[int]) -> list[str]:
    return [f"0-{number}-0-1-s" for number in numbers]


def write_run(journal: Journal) -> None:
    """Two groups per step: steps 1 and 2 trained, step 3 begun, one group ready; four that are not trained."""
    journal.note_facts({"groups_per_step": "2", "num_iterations": "1", "reward_names": '["correct"]'})
    journal.end_step(0)
    journal.note_policy(0, 0, "d0")
    journal.append([entry(0), entry(1, outcome="no_signal", reward=1.0), entry(2), entry(3, producer="q")])
    claim(journal, 1, 1, 2, 0)
    journal.end_step(1)
    journal.note_policy(1, 1, "d1")
    journal.append([entry(4, 1, reward=-0.25), entry(5, 0, outcome="stale", reward=None), entry(6, 1), entry(7, 1)])
    claim(journal, 2, 2, 3, 4)
    journal.end_step(2)
    journal.note_policy(2, 2, "d2")
    journal.append([entry(8, 2), entry(9, 2), entry(10, 2)])
    journal.drop(ids([8]), "stale")
    journal.drop(ids([9]), "configuration")
    claim(journal, 3, 3, 7, 6)


def claim(journal: Journal, step: int, last_step: int, *fresh: int, again: tuple[int, ...] = ()) -> None:
    journal.claim(RecordedBatch(step, last_step, ids([*fresh, *again]), len(fresh)))


def batch(step: int, last_step: int, fresh: list[int], again: tuple[int, ...] = ()) -> RecordedBatch:
    return RecordedBatch(step, last_step, ids([*fresh, *again]), len(fresh))


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of the journal and of its write-ahead log."""
    return {file.name: file.read_bytes() for file in path.parent.glob("*.sqlite*") if not file.name.endswith("-shm")}


@pytest.fixture
def reader(journal: Journal) -> Iterator[JournalReader]:
    write_run(journal)
    with closing(JournalReader(journal.path)) as result:
        yield result


def numbers(rows: Iterable[GroupRow]) -> list[int]:
    return [row.prompt_id for row in rows]


def test_a_row_has_every_column(reader: JournalReader) -> None:
    row = reader.row("0-4-0-1-s")
    assert row is not None
    expected = entry(4, 1, reward=-0.25)
    assert row == GroupRow(
        seq=5, lease_id="0-4-0-1-s", epoch=0, prompt_id=4, reroll=0, attempt=1, producer="p", policy_version=1,
        outcome="accepted", reward=-0.25, verdict="mixed", num_scored=2, num_successes=1, num_tokens=4,
        num_bytes=len(expected.frame), accepted_at=row.accepted_at, crc=expected.crc(), step=2, last_step=2, position=1,
        tries=0, dropped=None, num_replays=0, state="trained",
    )  # fmt: skip
    assert reader.row("0-4-0-2-s") is None


def test_every_group_is_in_one_state(reader: JournalReader, journal: Journal) -> None:
    journal.drop(ids([10]), "quarantined")
    journal.append([entry(11, 2)])
    found = {state: numbers(reader.rows(GroupFilter(state=state))) for state in STATES}
    assert found == {
        "ready": [11],
        "claimed": [6, 7],
        "trained": [0, 2, 3, 4],
        "no_signal": [1],
        "stale": [5, 8],
        "quarantined": [10],
        "dropped": [9],
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (GroupFilter(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (GroupFilter(versions=(1, 1)), [4, 6, 7]),
        (GroupFilter(versions=(1, 2)), [4, 6, 7, 8, 9, 10]),
        (GroupFilter(steps=(2, 2)), [3, 4]),
        (GroupFilter(steps=(2, 9)), [3, 4, 6, 7]),
        (GroupFilter(rewards=(-1.0, 0.0)), [4]),
        (GroupFilter(rewards=(0.5, 1.0)), [0, 1, 2, 3, 6, 7, 8, 9, 10]),
        (GroupFilter(prompt_id=3), [3]),
        (GroupFilter(versions=(0, 0), state="trained", steps=(1, 1)), [0, 2]),
        (GroupFilter(versions=(3, 9)), []),
    ],
)
def test_filters(reader: JournalReader, wanted: GroupFilter, expected: list[int]) -> None:
    assert numbers(reader.rows(wanted)) == expected
    assert reader.count(wanted) == len(expected)
    assert numbers(reader.rows(wanted, newest=2)) == expected[-2:]


def test_facts_policies_and_what_went_wrong(reader: JournalReader, journal: Journal) -> None:
    assert reader.facts() == {"groups_per_step": "2", "num_iterations": "1", "reward_names": '["correct"]'}
    assert [(p.version, p.step, p.digest) for p in reader.policies()] == [(0, 0, "d0"), (1, 1, "d1"), (2, 2, "d2")]
    journal.add_dead_letter(DeadLetter(0, 12, 0, 3, "data", "reward_failed", "it raised"))
    journal.quarantine_frames([("checksum mismatch", b"SL" + b"x" * 98)])
    (letter,) = reader.dead_letters()
    assert (letter.epoch, letter.prompt_id, letter.attempts, letter.failure) == (0, 12, 3, "data")
    assert (letter.reason, letter.detail, letter.failed_at > 0) == ("reward_failed", "it raised", True)
    (frame,) = reader.refused_frames()
    assert (frame.reason, frame.num_bytes, frame.head) == ("checksum mismatch", 100, b"SL" + b"x" * 62)


def test_the_policy_a_step_starts_from_is_the_newest_of_the_last_step_taken(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        for step, version in ((0, 0), (2, 1), (4, 2), (2, 3)):  # version 3 after a restart at step 1
            journal.end_step(step)
            journal.note_policy(version, step, f"d{version}")
        with closing(JournalReader(journal.path)) as reader:
            found = {step: policy and policy.version for step in range(-1, 6) for policy in [reader.policy_at(step)]}
    assert found == {-1: None, 0: 0, 1: 0, 2: 3, 3: 3, 4: 2, 5: 2}


def test_the_policy_of_a_step_is_found_without_reading_the_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal.note_policy(1, 2, "d1")
    with closing(JournalReader(path)) as reader:
        assert reader.policy_at(3) == reader.policy_at(2) != reader.policy_at(1)
        plans: list[str] = []
        query = reader._query

        def explained(sql: str, *bindings: Any) -> list[Any]:
            plans.extend(text for *_, text in query(f"EXPLAIN QUERY PLAN {sql}", *bindings))
            return query(sql, *bindings)

        reader._query = explained  # type: ignore[method-assign]
        assert reader.policy_at(3) is not None
    assert plans == ["SEARCH policies USING INDEX policies_by_step (step<?)"]


def test_frames_in_the_order_asked_for(reader: JournalReader) -> None:
    messages = [decode(frame) for frame in reader.frames(ids([4, 0]))]
    assert messages == [group_message("0-4-0-1-s", 1), group_message("0-0-0-1-s", 0)]
    with pytest.raises(
        JournalError, match=r"does not hold group 0-99-0-1-s; `slipstream journal list` shows what it holds$"
    ):
        reader.frames(ids([0, 99]))


# Batches


def test_batches_in_the_order_in_which_they_were_trained(reader: JournalReader) -> None:
    assert list(reader.batches()) == [batch(1, 1, [2, 0]), batch(2, 2, [3, 4]), batch(3, 3, [7, 6])]
    assert list(reader.batches(from_step=3)) == [batch(3, 3, [7, 6])]
    assert list(reader.batches(from_step=4)) == []


def test_a_batch_of_several_iterations_belongs_to_each_of_its_steps(journal: Journal) -> None:
    journal.append(entry(number) for number in range(4))
    claim(journal, 1, 3, 0, 1)
    claim(journal, 4, 6, 2, 3)
    with closing(JournalReader(journal.path)) as reader:
        assert list(reader.batches(from_step=3)) == [batch(1, 3, [0, 1]), batch(4, 6, [2, 3])]
        assert list(reader.batches(from_step=4)) == [batch(4, 6, [2, 3])]
        assert numbers(reader.rows(GroupFilter(steps=(3, 4)))) == [0, 1, 2, 3]


def test_replays_follow_in_their_batch_and_are_counted(journal: Journal) -> None:
    journal.append(entry(number) for number in range(4))
    claim(journal, 1, 1, 0, 1)
    claim(journal, 2, 2, 2, again=(1,))
    claim(journal, 3, 3, 3, again=(1, 0))
    with closing(JournalReader(journal.path)) as reader:
        assert list(reader.batches(2)) == [batch(2, 2, [2], (1,)), batch(3, 3, [3], (1, 0))]
        assert [row.num_replays for row in reader.rows()] == [1, 2, 0, 0]
        assert numbers(reader.rows(GroupFilter(steps=(3, 3)))) == [3], "the steps of a row are its first training"


def test_only_the_surviving_lineage_counts(reader: JournalReader, journal: Journal) -> None:
    claim(journal, 3, 3, 7, 6)  # the trainer died in step 3 for the second time
    recover(journal, 2, journal.last_seq, StalenessBudget(2, 9, num_iterations=1), smaller=False, comparable=True)
    assert list(reader.batches(from_step=2)) == [batch(2, 2, [3, 4])]
    journal.append([entry(11, 2)])
    claim(journal, 3, 3, 10, 11)
    assert list(reader.batches(from_step=2)) == [batch(2, 2, [3, 4]), batch(3, 3, [10, 11])]
    assert numbers(reader.rows(GroupFilter(state="quarantined"))) == [6, 7]


def test_iterations_before_a_quarantine_stay_trained(journal: Journal) -> None:
    journal.note_facts({"num_iterations": "2"})
    journal.append(entry(number) for number in range(4))
    for _ in range(2):  # both times it died in step 2, with a checkpoint at step 1
        claim(journal, 1, 2, 0, 1)
    recover(journal, 1, journal.last_seq, StalenessBudget(2, 9, num_iterations=2), smaller=False, comparable=True)
    claim(journal, 2, 3, 2, 3)
    with closing(JournalReader(journal.path)) as reader:
        assert list(reader.batches()) == [batch(1, 1, [0, 1]), batch(2, 3, [2, 3])]


# Beside a writer, and without one


def test_a_reader_sees_what_a_live_writer_commits(reader: JournalReader, journal: Journal) -> None:
    rows = reader.rows()
    assert next(rows).prompt_id == 0
    journal.append([entry(11, 2)])
    assert len(list(rows)) == 10, "those that were there when the iteration began"
    assert numbers(reader.rows(newest=1)) == [11]
    half = reader.rows()
    next(half)
    blocked, in_log, checkpointed = journal.query("PRAGMA wal_checkpoint(TRUNCATE)")[0]
    assert (blocked, in_log, checkpointed) == (0, 0, 0), "an iteration holds no transaction open"


def test_a_group_that_retention_deletes_meanwhile_is_gone_and_not_damaged(
    reader: JournalReader, journal: Journal
) -> None:
    row = reader.row("0-0-0-1-s")
    assert row is not None
    assert reader.num_deleted() == 0
    with journal.transaction() as db:
        for table in ("bodies", "groups"):
            db.execute(f"DELETE FROM {table} WHERE seq = 1")
    assert reader.body(row) is None
    assert reader.num_deleted() == 1


def test_the_journal_of_a_killed_trainer(journal: Journal, tmp_path: Path) -> None:
    write_run(journal)
    killed = tmp_path / "killed" / "journal.sqlite"
    killed.parent.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{journal.path}{suffix}", f"{killed}{suffix}")
    before = contents(killed)
    assert len(before["journal.sqlite-wal"]) > 4096, "the log still holds what was written"
    with closing(JournalReader(killed)) as reader:
        assert len(list(reader.rows())) == 11
        assert len(reader.frames(ids(range(11)))) == 11
        assert reader.database_problems() == []
    assert contents(killed) == before


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        write_run(journal)
    monkeypatch.setattr("os.access", lambda *arguments: False)
    with closing(JournalReader(tmp_path / "journal.sqlite")) as reader:
        assert reader.count() == 11
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal.sqlite", "journal.sqlite.lock"]


def test_a_path_with_characters_that_mean_something_in_a_uri(tmp_path: Path) -> None:
    path = tmp_path / "100% of run?1#2" / "journal.sqlite"
    with closing(Journal(path)) as journal, closing(JournalReader(path)) as reader:
        journal.append([entry(0)])
        assert reader.count() == 1


def test_an_empty_journal(journal: Journal) -> None:
    with closing(JournalReader(journal.path)) as reader:
        assert (list(reader.rows()), list(reader.rows(newest=5)), list(reader.batches())) == ([], [], [])
        assert (reader.facts(), list(reader.policies()), reader.policy_at(9)) == ({}, [], None)
        assert (reader.count(), reader.num_deleted(), reader.database_problems()) == (0, 0, [])


@pytest.mark.long
def test_twenty_thousand_groups_in_bounded_memory(journal: Journal) -> None:
    journal.append(entry(number, frame=b"x" * 100) for number in range(20_000))
    with closing(JournalReader(journal.path)) as reader:
        tracemalloc.start()
        try:
            assert sum(row.num_tokens for row in reader.rows()) == 80_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 * 2**20, "1000 rows at a time; all of them would be some 12 MiB"


# What is wrong with it


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError) as caught:
        JournalReader(tmp_path / "journal.sqlite")
    assert str(caught.value) == (
        f"{tmp_path}/journal.sqlite: no such file; a journal is RUN_DIR/journal.sqlite, written by rl-trainer"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_a_file_that_is_no_journal(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal.sqlite is not a journal; a journal is RUN_DIR/journal.sqlite, "):
        JournalReader(path)


def test_another_schema(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    alter(path, "PRAGMA user_version = 9")
    with pytest.raises(JournalError, match=r"has journal schema 9, this release reads 2; use its release$"):
        JournalReader(path)


def test_a_damaged_and_a_missing_body(reader: JournalReader, journal: Journal) -> None:
    alter(journal.path, "UPDATE bodies SET frame = ? WHERE seq = 1", entry(0).frame[:-1] + b"?")
    damaged = rf"^{journal.path}: group 0-0-0-1-s is damaged \(checksum\); restore a copy of run_dir$"
    for read in (lambda: reader.frames(ids([2, 0])), lambda: reader.body(next(reader.rows()))):
        with pytest.raises(JournalError, match=damaged):
            read()
    alter(journal.path, "DELETE FROM bodies WHERE seq = 3")
    with pytest.raises(JournalError, match=r"group 0-2-0-1-s has no body; restore a copy of run_dir$"):
        reader.frames(ids([2]))


def test_text_that_is_none(reader: JournalReader, journal: Journal) -> None:
    alter(journal.path, "UPDATE groups SET producer = CAST(x'ff' AS TEXT) WHERE seq = 1")
    with pytest.raises(JournalError, match=r"is damaged \(.*\); restore a copy of run_dir$"):
        list(reader.rows())


def test_a_body_without_a_group(reader: JournalReader, journal: Journal) -> None:
    alter(journal.path, "INSERT INTO bodies VALUES(99, 'x')")
    assert reader.database_problems() == ["body 99 belongs to no group"]


def test_pages_that_were_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal.append(entry(number) for number in range(500))
    content = bytearray(path.read_bytes())
    content[8 * 4096 :] = b"\xff" * (len(content) - 8 * 4096)
    path.write_bytes(content)
    with (
        closing(JournalReader(path)) as reader,
        pytest.raises(JournalError, match=r"is damaged \(.*\); restore a copy of run_dir$"),
    ):
        list(reader.rows())
