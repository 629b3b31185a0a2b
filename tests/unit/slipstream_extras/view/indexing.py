"""Builds an index at once, where the viewer does it in the background."""

from contextlib import closing
from pathlib import Path

from slipstream.decoder import find_decoder
from slipstream.run_reader import RunReader
from slipstream_extras.view.index.cache import create
from slipstream_extras.view.index.rows import RowIndex
from slipstream_extras.view.index.steps import StepIndex
from slipstream_extras.view.index.texts import TextIndex


def index_whole(run: RunReader, place: Path) -> None:
    """Everything that is there now, in an index that is there or not."""
    with closing(run.journal()) as reader:
        facts = reader.facts()
        with closing(create(place, facts["run_id"])) as db:
            rows, steps = RowIndex(db), StepIndex(db, run.folder)
            texts = TextIndex(db, find_decoder(facts)[0])
            while steps.add_new():
                pass
            while rows.add_new(reader):
                pass
            rows.follow(reader)
            rows.sweep(reader)
            while texts.add(reader):
                pass
