"""Room on the disk of a run.

Guarantee: `has_room` says no while the disk is fuller than allowed, and yes again by itself; a reserve file stands by so
that, on a full disk, what was in progress can be finished and old rows deleted.
"""

import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

RESERVE_BYTES = 4 * 2**20


class DiskGuard:
    """See the module's guarantee. `folder` is any folder of the disk, `max_used` a share of it, 0 to 1."""

    def __init__(self, folder: Path, max_used: float) -> None:
        self._folder = folder
        self.max_used = max_used
        self._reserve = folder / "journal.reserve"
        self.has_room = True
        self.look()

    @property
    def used(self) -> float:
        """The share of the disk that cannot be written to any more, as `df` counts it."""
        usage = shutil.disk_usage(self._folder)
        return 1.0 - usage.free / max(1, usage.used + usage.free)

    def complaint(self) -> str | None:
        """What is wrong, in words, if anything is."""
        if self.has_room:
            return None
        return f"{self.used:.0%} full, no leases are given above {self.max_used:.0%} (replay.max_disk_used)"

    def look(self) -> None:
        """Looks at the disk, and says so when the answer changed."""
        had_room, self.has_room = self.has_room, self.used <= self.max_used
        if self.has_room and not had_room:
            logger.info("the disk of run_dir is %.0f%% full: leases are given again", 100 * self.used)
        elif had_room and not self.has_room:
            text = "the disk of run_dir is %.0f%% full: no leases until there is room (replay.max_disk_used)"
            logger.warning(text, 100 * self.used)
        if self.has_room and not self._reserve.exists():
            self._keep_reserve()

    def spend_reserve(self) -> None:
        """The disk is full: gives the reserve to whoever must finish something."""
        self._reserve.unlink(missing_ok=True)

    def _keep_reserve(self) -> None:
        try:
            with self._reserve.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)
        except OSError:  # less room than we thought: the next look tries again
            self._reserve.unlink(missing_ok=True)
