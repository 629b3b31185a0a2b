"""The index says what the journal says, also after the trainer, retention or a crash changed it."""

import os
import time
from contextlib import closing, suppress
from pathlib import Path

import apsw
import pytest

from replay.journal.reader import JournalReader
from replay.journal.retention import Retention
from replay.journal.writer import Journal
from slipstream.decoder import Decoder, find_decoder
from slipstream.run_reader import RunReader
from slipstream_extras.view.index import builder, cache
from slipstream_extras.view.index.builder import Builder
from slipstream_extras.view.index.cache import DamagedIndexError, SlowQueryError, create, locked, opened, place_of
from slipstream_extras.view.index.rows import RowIndex
from slipstream_extras.view.index.steps import StepIndex, ends, line_of, lines_since, newest_lines, times_since
from slipstream_extras.view.index.texts import progress
from tests.unit.slipstream_extras.view.indexing import index_whole
from tests.view_run import START, facts, step_line, take_step, write_tokenizer


def indexed(db: apsw.Connection, sql: str) -> list[tuple]:
    return db.execute(sql).fetchall()


def look(place: Path, sql: str) -> list[tuple]:
    with opened(place) as db:
        assert db is not None
        return indexed(db, sql)


@pytest.mark.long
def test_every_group_is_there_with_the_numbers_of_its_body(index: apsw.Connection, written_run: Path) -> None:
    assert indexed(index, "SELECT count(*), min(seq), max(seq) FROM groups") == [(120, 1, 120)]
    # Prompts 0, 5, ... of 40 are truncated once; each group was scored for a quarter of a second.
    assert indexed(index, "SELECT sum(truncated), min(scoring_s), max(scoring_s) FROM groups") == [(24, 0.25, 0.25)]
    assert indexed(index, "SELECT name FROM producers ORDER BY id") == [("producer-0",), ("producer-1",)]
    assert progress(index, 120) == (1.0, 1.0)
    assert progress(index, 240) == (0.5, 0.5)


def test_steps_that_the_trainer_takes_are_followed(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    index_whole(RunReader(run), place)
    ((last, ready),) = look(place, "SELECT max(step), sum(state = 0) FROM groups")
    with closing(Journal(run / "journal.sqlite")) as journal:
        waiting = [
            group for (group,) in journal.query("SELECT lease_id FROM groups WHERE step IS NULL AND reward > 0 LIMIT 4")
        ]
        take_step(journal, run, last + 1, waiting)
    index_whole(RunReader(run), place)
    assert look(place, "SELECT max(step), sum(state = 0) FROM groups") == [(last + 1, ready - 4)]
    assert look(place, f"SELECT count(*) FROM groups WHERE step = {last + 1}") == [(4,)]
    assert look(place, "SELECT max(step) FROM steps") == [(last + 1,)]


def test_what_did_not_change_is_not_written_again(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    index_whole(RunReader(run), place)
    with closing(RunReader(run).journal()) as reader, closing(create(place, reader.facts()["run_id"])) as db:
        rows = RowIndex(db)
        rows.follow(reader)
        rows.sweep(reader)
        assert db.total_changes() == 0


def test_groups_that_retention_deletes_leave_the_index_and_the_search(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    index_whole(RunReader(run), place)
    with closing(Journal(run / "journal.sqlite")) as journal:
        kept = {"0-1-0-1-s"}
        num_deleted = Retention(journal).prune(
            oldest_step=8, oldest_seq=120, replayable=kept, keep_bytes=0, keep_age_s=1e9
        )
        there = journal.query("SELECT seq FROM groups ORDER BY seq")
    assert num_deleted > 10
    index_whole(RunReader(run), place)
    assert look(place, "SELECT seq FROM groups ORDER BY seq") == there
    assert look(place, "SELECT rowid FROM texts WHERE texts MATCH 'many' ORDER BY rowid") == there


def test_an_index_of_another_run_or_release_or_a_damaged_one_is_built_again(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    for spoil in ("UPDATE facts SET value = 'other' WHERE name = 'run_id'", "PRAGMA user_version = 99", None):
        with closing(create(place, "r")) as db:
            assert indexed(db, "SELECT count(*) FROM steps") == [(0,)]
            db.execute("INSERT INTO steps VALUES(1, 0, 0, 0, '{}')")
            if spoil:
                db.execute(spoil)
        if spoil is None:
            place.write_bytes(b"no database " * 100)
    with closing(create(place, "r")) as db:
        assert indexed(db, "SELECT count(*) FROM steps") == [(0,)]
    assert place.stat().st_mode & 0o077 == 0


def test_an_index_goes_on_where_it_stopped(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    with closing(RunReader(run).journal()) as reader, closing(create(place, "view")) as db:
        rows = RowIndex(db)
        assert rows.add_new(reader)
        db.execute("UPDATE groups SET reward = 7 WHERE seq = 1")
    with closing(RunReader(run).journal()) as reader, closing(create(place, "view")) as db:
        rows = RowIndex(db)
        assert not rows.add_new(reader)
        assert indexed(db, "SELECT reward FROM groups WHERE seq = 1") == [(7.0,)]  # not read again
        rows.sweep(reader)
        assert indexed(db, "SELECT reward FROM groups WHERE seq = 1") == [(0.0,)]


def test_steps_that_a_crash_undid_leave_no_row(run: Path, tmp_path: Path) -> None:
    with closing(create(tmp_path / "index.sqlite", "view")) as db:
        steps = StepIndex(db, run)
        while steps.add_new():
            pass
        lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
        assert indexed(db, "SELECT count(*) FROM steps") == [(len(lines),)]
        (run / "steps.jsonl").write_text("".join(lines[:5]))
        while steps.add_new():
            pass
        assert indexed(db, "SELECT max(step) FROM steps") == [(5,)]
        again = [
            str(step_line(step) | {"reward": 0.5}).replace("'", '"').replace("None", "null") for step in range(6, 30)
        ]
        (run / "steps.jsonl").write_text("".join(lines[:4]) + lines[4].replace("0.8", "0.1") + "\n".join(again) + "\n")
        while steps.add_new():
            pass
        assert indexed(db, "SELECT max(step), sum(line LIKE '%\"reward\": 0.5%') FROM steps")[0][0] == 29
        (run / "steps.jsonl").unlink()
        steps.add_new()
        assert indexed(db, "SELECT count(*) FROM steps") == [(0,)]


def test_of_a_long_run_an_even_choice_of_steps_is_read(index: apsw.Connection) -> None:
    newest = newest_lines(index, 3)
    last = newest[-1]["step"]
    assert [line["step"] for line in newest] == [last - 2, last - 1, last]
    assert [line["step"] for line in lines_since(index, START + 20, 4)] == [
        step for step in range(10, last + 1) if step % -(-(last - 9) // 4) == 0
    ]
    assert times_since(index, START + 2 * last) == [{"step": last, "t": START + 2 * last, "wait_s": 0.5, "step_s": 1.5}]
    assert [line["step"] for line in ends(index)] == [1, last]
    assert line_of(index, 4)["reward"] == 0.75
    assert line_of(index, 4000) == {}


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run: Path, tmp_path: Path) -> None:
    path = run / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    with closing(create(tmp_path / "index.sqlite", "view")) as db:
        steps = StepIndex(db, run)
        while steps.add_new():
            pass
        assert indexed(db, "SELECT max(step) FROM steps") == [(3,)]
        with path.open("ab") as file:
            file.write(lines[3][10:])
        while steps.add_new():
            pass
        assert indexed(db, "SELECT max(step) FROM steps") == [(4,)]


def test_the_builder_indexes_a_run_that_begins_after_it(written_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    place = tmp_path / "cache" / "index.sqlite"
    with Builder(RunReader(folder), place, lambda found: find_decoder(found)[0]):
        folder.symlink_to(written_run)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with opened(place) as db:
                if progress(db, 120) == (1.0, 1.0):
                    break
            time.sleep(0.05)
        else:
            pytest.fail("the index was not built")


def test_whatever_happens_to_the_run_or_to_the_index_the_builder_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder, "_AGAIN_S", 0.01)
    monkeypatch.setattr(builder, "_EVERY_S", 0.01)
    place, follow, fails = tmp_path / "cache" / "index.sqlite", RowIndex.follow, iter([True, True])

    def spoilt(self: RowIndex, reader: JournalReader) -> None:
        if next(fails, False):
            raise ZeroDivisionError
        follow(self, reader)

    def until_whole() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(DamagedIndexError), opened(place) as db:
                if progress(db, 120) == (1.0, 1.0):
                    return
            time.sleep(0.01)
        pytest.fail("the index was not built")

    monkeypatch.setattr(RowIndex, "follow", spoilt)
    with (run / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": %d}\n{"step": 99, "t": %d}\n' % (10**30, 10**30))
    with Builder(RunReader(run), place, lambda found: find_decoder(found)[0]):
        until_whole()
        place.write_bytes(b"no database " * 100)
        until_whole()
    assert capsys.readouterr().err.count("Traceback") == 1


def test_one_process_builds_an_index(tmp_path: Path) -> None:
    place = tmp_path / "view" / "index.sqlite"
    with locked(place) as mine:
        assert mine
        with locked(place) as other:
            assert not other
    with locked(place) as mine:
        assert mine


def test_indexes_that_nobody_uses_are_removed_and_nothing_else(tmp_path: Path) -> None:
    old, built, read, new = (tmp_path / f"{number:016x}.sqlite" for number in range(4))
    foreign = tmp_path / "mine.sqlite"
    for path in (old, built, read, new, foreign):
        create(path, "r").close()
    with locked(built):
        for path in (old, built, read, foreign):
            os.utime(path, (0, 0))
        with opened(read):
            pass
        with locked(new):
            assert not old.exists()
            assert all(path.exists() for path in (built, read, new, foreign))


def test_two_journals_have_two_indexes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = place_of(tmp_path / "a" / "journal.sqlite"), place_of(tmp_path / "b" / "journal.sqlite")
    assert first != second
    assert first.parent == second.parent == tmp_path / "slipstream" / "view"


def test_a_statement_that_takes_long_is_given_up(written_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LONGEST_S", -1.0)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(SlowQueryError, match="choose fewer groups"):
        look(written_index, endless)


def test_pieces_are_the_text_and_a_character_of_several_tokens_is_one_piece(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    decoder = Decoder(tokenizer)
    ids = tokenizer.encode("a é漢b", add_special_tokens=False).ids
    assert decoder.pieces(ids) == ["a", " ", "", "é", "", "", "漢", "b"]
    half = ids[:-2]  # ends within a character
    assert "".join(decoder.pieces(half)) == decoder.texts([half])[0]
    assert len(decoder.pieces(half)) == len(half)


def test_a_tokenizer_that_is_another_one_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    found = facts(tmp_path / "model")
    assert find_decoder(found)[0] is not None
    assert find_decoder(found | {"tokenizer_digest": "0"}) == (
        None, f"the tokenizer in {tmp_path / 'model'} is not the one of the run",
    )  # fmt: skip
    assert "--tokenizer" in find_decoder(found | {"model_path": str(tmp_path)})[1]
    assert find_decoder({})[1] == "the journal does not name its model"
    assert find_decoder(found | {"model_path": "/gone"}, tmp_path / "model")[0] is not None
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in find_decoder({"model_path": str(tmp_path / "model")})[1]
