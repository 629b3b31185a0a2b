"""The journal on a disk that is full or fails, and between threads: when a method raises, nothing of it happened."""

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import JournalError
from replay.journal import writer as journal_module
from replay.journal.schema import TABLES
from replay.journal.writer import Journal, JournalFullError
from tests.unit.replay.builders import claim, entry, lease_ids
from tests.unit.replay.journals import everything, fill, rows

# A disk that is full, and one that fails.


@contextlib.contextmanager
def page_limit(journal: Journal) -> Iterator[None]:
    """The file has all the pages that it will ever have."""
    journal.query(f"PRAGMA max_page_count = {journal.query('PRAGMA page_count')[0][0]}")
    yield
    journal.query("PRAGMA max_page_count = 1000000000")


BIG = b"x" * 100_000


def test_on_a_full_disk_nothing_happens_and_the_same_call_succeeds_later(journal: Journal) -> None:
    fill(journal)
    before = everything(journal)
    calls = [
        lambda: journal.append([entry(10), entry(11, frame=BIG), entry(12)]),
        lambda: journal.quarantine_frames([("big", BIG)]),
        lambda: journal.note_facts({"small": "x", "big": "x" * 100_000}),
    ]
    with page_limit(journal):
        for call in calls * 2:
            with pytest.raises(JournalFullError) as caught:
                call()
            assert str(caught.value) == (
                f"the disk of {journal.path} is full; make room, or move run_dir to a larger one"
            )
            assert everything(journal) == before
        journal.end_step(2)  # what needs no room still works
    for call in calls:
        call()
    assert rows(journal, "prompt_id, num_bytes, tries")[4:] == [(10, 18, 0), (11, 100_000, 0), (12, 18, 0)]
    assert journal.last_seq == 7
    assert journal.facts()["small"] == "x"


def test_an_error_of_the_caller_inside_a_transaction_undoes_it_and_is_passed_on(journal: Journal) -> None:
    def half_done() -> None:
        with journal.transaction() as db:
            db.execute("INSERT INTO facts VALUES('half', 'done')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_done()
    assert journal.facts() == {}
    journal.note_facts({"then": "it goes on"})


@contextlib.contextmanager
def failing_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `num_bytes`: the kernel refuses the write with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_io_error_is_final_and_nothing_of_the_call_happened(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    fill(journal)
    before = everything(journal)
    with failing_disk(path.with_name("journal.sqlite-wal").stat().st_size + 10_000):
        with pytest.raises(JournalError, match="cannot be written or read") as caught:
            journal.append([entry(10), entry(11, frame=BIG)])
        assert not isinstance(caught.value, JournalFullError)
    calls = [
        lambda: journal.append([entry(10)]),
        lambda: claim(journal, 3, 3, 0),
        lambda: journal.end_step(2),
        lambda: journal.known(["g"]),
        lambda: journal.facts(),
        lambda: journal.last_seq,
    ]
    for call in calls:  # there is room again, but who knows what is on the disk
        with pytest.raises(JournalError, match="cannot be written or read"):
            call()
    journal.close()
    with contextlib.closing(Journal(path)) as after:
        assert everything(after) == before


def test_a_journal_that_cannot_be_created_gives_its_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with failing_disk(1000), pytest.raises(JournalError, match="cannot be written or read"):
        Journal(path)
    with contextlib.closing(Journal(path)) as after:
        assert after.query("PRAGMA auto_vacuum") == [(2,)]
        fill(after)
        assert after.last_seq == 4


def test_a_crash_while_the_tables_were_made_is_mended_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.sqlite"
    tables = TABLES
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "TABLES", tables[: tables.index("CREATE TABLE IF NOT EXISTS policies")] + "oops")
        with pytest.raises(JournalError, match="syntax error"):
            Journal(path)
    with contextlib.closing(Journal(path)) as after:
        fill(after)
        assert after.query("PRAGMA auto_vacuum") == [(2,)]


# Two threads.


def test_two_threads_do_not_disturb_each_other(journal: Journal) -> None:
    errors: list[BaseException] = []
    done = threading.Event()
    seen = []

    def run(task) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    def write() -> None:
        for prompt_id in range(0, 300, 3):
            journal.append([entry(prompt_id), entry(prompt_id + 1), entry(prompt_id + 2)])
        done.set()

    def train() -> None:
        is_last = False
        while not is_last:
            is_last = done.is_set()  # one look at least, also where the writer is faster than this thread starts
            newest = journal.query("SELECT count(*), max(prompt_id) FROM groups")[0]
            seen.append(newest)
            if newest[0]:
                assert journal.frames(lease_ids(newest[1])) == [f"frame of prompt {newest[1]}".encode()]
                claim(journal, newest[0], newest[0], newest[1])
                journal.end_step(newest[0])
                journal.note_policy(newest[0], newest[0], "digest")

    threads = [threading.Thread(target=run, args=(task,)) for task in (write, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert all(count % 3 == 0 and (count == 0 or newest == count - 1) for count, newest in seen)
    assert rows(journal, "prompt_id") == [(i,) for i in range(300)]
    assert journal.newest_version == max(count for count, _ in seen)
