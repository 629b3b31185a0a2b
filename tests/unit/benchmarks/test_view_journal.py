"""What `rl-view` is measured with: a journal that a trainer could have written, and pages that exist."""

from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from benchmarks.view import _pages
from benchmarks.view_journal import GROUPS_PER_STEP, write_journal
from tools.journal.content import ContentReader
from tools.run_reader import RunReader
from tools.view.index.decoder import find_decoder
from tools.view.pages.forms import cursor_of, wanted_of


def test_every_group_is_there_and_can_be_read(tmp_path: Path) -> None:
    write_journal(tmp_path, 4_100)  # more than one commit takes
    with closing(RunReader(tmp_path / "run").journal()) as reader:
        assert reader.count() == 4_100
        assert reader.database_problems() == []
        row = reader.row("0-4000-0-1-bench")
        assert row is not None
        content = ContentReader(reader).read(row)
        assert content is not None
        decoder, problem = find_decoder(reader.facts())
        assert decoder is not None, problem
        assert len(decoder.texts([content.group.prompt_ids.tolist()])[0].split()) == 12
        assert row.step in (None, 4_000 // GROUPS_PER_STEP + 1)


def test_every_page_that_is_asked_for_makes_sense() -> None:
    for kind, paths in _pages(50, 100).items():
        for path in paths:
            query = dict(parse_qsl(urlsplit(path).query))
            if kind != "group":
                wanted_of(query), cursor_of(query)
