"""The groups that are worth reading, and the beginnings of texts in lists."""

import shutil
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from slipstream.decoder import Decoder, find_decoder
from slipstream.journal.content import Content, ContentReader
from slipstream.run_reader import RunReader
from slipstream_extras.view.index.reading import worth_reading
from slipstream_extras.view.index.rows import VERDICTS
from slipstream_extras.view.pages.brief import Said, brief
from tests.view_run import completion_text


@pytest.fixture
def changed(written_index: Path, tmp_path: Path) -> apsw.Connection:
    """An index to change."""
    return apsw.Connection(str(shutil.copy(written_index, tmp_path / "index.sqlite")))


def test_each_reason_names_the_newest_group_that_leads_it_and_none_twice(changed: apsw.Connection) -> None:
    with closing(changed) as db:
        db.execute("UPDATE groups SET spread = 0.25, longest = 10, reward = 0.5, verdict = 2")
        db.execute("UPDATE groups SET spread = 0.75, longest = 99 WHERE seq IN (20, 30)")
        db.execute("UPDATE groups SET verdict = ? WHERE seq IN (12, 17)", (VERDICTS.index("solved"),))
        db.execute("UPDATE groups SET version = 0 WHERE seq = 60")
        db.execute("UPDATE groups SET reward = -3 WHERE seq = 50")
        ((step,),) = db.execute("SELECT step FROM groups WHERE seq = 60").fetchall()
        assert [tuple(one) for one in worth_reading(db)] == [
            ("highest spread", 30, 0.75),
            ("newest solved", 17, 17),
            ("longest", 20, 99),
            ("most stale", 60, step - 1),
            ("worst", 50, 3.0),
        ]


def test_an_index_without_groups_names_none(changed: apsw.Connection) -> None:
    with closing(changed) as db:
        db.execute("DELETE FROM groups")
        assert worth_reading(db) == []


def content(run: Path, lease_id: str) -> tuple[Content, dict[str, str], Decoder | None]:
    with closing(RunReader(run).journal()) as reader:
        row, facts = reader.row(lease_id), reader.facts()
        assert row is not None
        found = ContentReader(reader).read(row)
    assert found is not None
    return found, facts, find_decoder(facts)[0]


def test_a_list_shows_the_question_and_both_ends_of_the_rewards(written_run: Path) -> None:
    shown = brief(*content(written_run, "2-5-0-1-s"))  # two of three are right
    assert shown.prompt == "How many melons are 5 and 2?"
    texts = [" ".join(completion_text(5, number).split()) for number in (0, 2)]
    assert [shown.best, shown.worst] == [Said(texts[0], 1.0), Said(texts[1], 0.0)]


def test_equal_rewards_have_no_worst_and_unscored_ones_no_number(written_run: Path) -> None:
    equal, unscored = (brief(*content(written_run, lease_id)) for lease_id in ("0-0-0-1-s", "0-10-0-1-s"))
    assert (equal.best is not None, equal.worst) == (True, None)
    assert unscored.best is not None
    assert (unscored.best.reward, unscored.worst) == (None, None)


def test_without_a_tokenizer_there_are_ids_and_a_long_text_is_cut(written_run: Path) -> None:
    found, facts, _ = content(written_run, "2-3-0-1-s")
    shown = brief(found, facts, None)
    assert shown.prompt.startswith(" ".join(map(str, found.group.prompt_ids[:8].tolist())))
    assert shown.best is not None
    assert len(shown.best.text) == 160
    assert shown.best.text.endswith("…")
