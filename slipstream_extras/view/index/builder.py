"""Builds the index beside the server, on a thread of its own that gives way to everything else.

Guarantee: it goes on where an earlier process stopped. A run that is not there yet, ends, is damaged or is replaced by another
ends nothing: it tries again. Of several viewers of one run one builds, and the others wait for their turn.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw

from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from slipstream.decoder import Decoder
from slipstream.run_reader import RunReader
from slipstream_extras.view.index.cache import create, locked
from slipstream_extras.view.index.rows import RowIndex
from slipstream_extras.view.index.steps import StepIndex
from slipstream_extras.view.index.texts import TextIndex

_EVERY_S, _LONGEST_S = 1.0, 5.0  # of a round
_SHARE = 0.01  # of the time, at most, for comparing rows that may have changed
_AGAIN_S = 3.0
_NICE = 19


class Builder:
    """Build within its context. `find_decoder` is asked when a journal is there."""

    def __init__(self, run: RunReader, place: Path, find_decoder: Callable[[dict[str, str]], Decoder | None]) -> None:
        self._run, self._place = run, place
        self._find_decoder = find_decoder
        self._stopped = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._stopped.is_set():
            try:
                with locked(self._place) as ours:
                    if ours:
                        self._build()
            except (JournalError, apsw.Error, OSError):
                pass  # the pages show the error of the journal; a cache that cannot be written has no index
            except Exception as error:
                self._say(error)
            self._stopped.wait(_AGAIN_S)

    def _build(self) -> None:
        """Build until it is stopped, or another file lies in the place of journal or index."""
        with closing(self._run.journal()) as reader:
            facts = reader.facts()
            with closing(create(self._place, facts.get("run_id", ""))) as db:
                rows, steps = RowIndex(db), StepIndex(db, self._run.folder)
                texts = TextIndex(db, self._find_decoder(facts))
                files = self._files(reader)
                while not self._stopped.is_set() and self._files(reader) == files:
                    self._round(reader, rows, steps, texts)

    def _files(self, reader: JournalReader) -> list[int]:
        return [path.stat().st_ino for path in (reader.path, self._place)]

    def _say(self, bug: Exception) -> None:
        """Write a bug once, because the next attempt may meet the same."""
        if self._said != (said := repr(bug)):
            self._said = said
            traceback.print_exception(bug)

    def _round(self, reader: JournalReader, rows: RowIndex, steps: StepIndex, texts: TextIndex) -> None:
        """Index new groups and steps, then words for as long as a round takes."""
        while steps.add_new() and not self._stopped.is_set():
            pass
        while rows.add_new(reader) and not self._stopped.is_set():
            pass
        began = time.monotonic()
        rows.follow(reader)
        rows.sweep(reader)
        ends = began + min(_LONGEST_S, max(_EVERY_S, (time.monotonic() - began) / _SHARE))
        while not self._stopped.is_set() and time.monotonic() < ends and texts.add(reader):
            pass
        self._stopped.wait(max(0.0, ends - time.monotonic()))
