"""What was computed, in a file beside the index of the run.

Guarantee: the newest `MOST` groups are kept. A file that is damaged has none, and is begun again.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from consumer.loss.limits import LOG_LIMIT

MOST = 200
_TABLE = """CREATE TABLE IF NOT EXISTS scores(id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, policy TEXT NOT NULL,
    version INTEGER NOT NULL, step INTEGER NOT NULL, temperature REAL NOT NULL, logprobs BLOB NOT NULL, entropies BLOB NOT NULL,
    UNIQUE(group_id, policy))"""
_COLUMNS = "policy, version, step, temperature, logprobs, entropies"


class Scores(NamedTuple):
    """Of the tokens of a group, (T,) each, in nats."""

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]

    def ratios(self, logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Importance ratios of tokens that were sampled with these log-probs, bounded as the trainer bounds them; NaN where the
        sampler gave none."""
        differences = self.logprobs.astype(np.float64) - logprobs
        return np.exp(np.clip(differences, -LOG_LIMIT, LOG_LIMIT))

    def part(self, tokens: slice) -> "Scores":
        return Scores(self.logprobs[tokens], self.entropies[tokens])


class ScoredBy(NamedTuple):
    """Under which policy."""

    key: str  # another one for other weights
    version: int
    step: int  # that made it
    temperature: float  # at which the group was sampled


class KeptScores:
    """`index` is the place of the run's index. Any thread may use it."""

    def __init__(self, index: Path) -> None:
        self._path = index.with_name(f"{index.stem}-scores.sqlite")

    def find(self, group_id: str, num_tokens: int) -> tuple[ScoredBy, Scores] | None:
        """What was computed last of this group."""
        sql = f"SELECT {_COLUMNS} FROM scores WHERE group_id = ? ORDER BY id DESC LIMIT 1"  # noqa: S608
        with contextlib.suppress(apsw.Error):
            if self._path.is_file():
                with self._opened() as db:
                    found: list[Any] = db.execute(sql, (group_id,)).fetchall()
                scores = [Scores(*(np.frombuffer(value, "<f4") for value in row[-2:])) for row in found]
                if found and all(len(values) == num_tokens for values in scores[0]):
                    return ScoredBy(*found[0][:-2]), scores[0]
        return None

    def add(self, group_id: str, by: ScoredBy, scores: Scores) -> None:
        """Raises `OSError` or `apsw.Error` if it cannot be kept."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        values = [value.astype("<f4").tobytes() for value in scores]
        try:
            with self._opened() as db, db:
                db.execute(_TABLE)
                sql = f"INSERT OR REPLACE INTO scores(group_id, {_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?)"
                db.execute(sql, (group_id, *by, *values))
                db.execute("DELETE FROM scores WHERE id <= (SELECT max(id) FROM scores) - ?", (MOST,))
        except (apsw.CorruptError, apsw.NotADBError):
            self._path.unlink()
            raise
        self._path.chmod(0o600)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[apsw.Connection]:
        with contextlib.closing(apsw.Connection(str(self._path))) as db:
            db.set_busy_timeout(2_000)
            yield db
