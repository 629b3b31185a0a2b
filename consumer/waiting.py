"""Waits on the main thread, with a limit and a log line every 10 s.

Guarantee: every wait says every ten seconds for whom or what, and ends with what `check` raises, or with `StalledError` after
`stall_timeout_s` without progress.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from protocol.errors import StalledError
from protocol.runtime.files import out_of_space
from protocol.runtime.stacks import log_stacks

_PAUSE_S = 0.25
_SAY_EVERY_S = 10.0
_Result = TypeVar("_Result")


class StopRequested(Exception):  # noqa: N818  a request, not an error
    """SIGTERM or Ctrl-C arrived; everything trained so far is in the weights."""


class ThreadErrors:
    """The errors that ended other threads, for the main thread to raise."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Note an error. Any thread may call it."""
        self.first = self.first or error

    def check(self) -> None:
        if self.first is not None:
            raise self.first


class Limit(NamedTuple):
    """The longest wait without progress, and the key of the configuration that sets it."""

    seconds: float
    key: str


@dataclass(eq=False)
class WaitPolicy:
    """Checks for a stop, reports every ten seconds, and times out.

    Args:
        check: raises when waiting makes no sense any more: `StopRequested`, or an error of another thread.
        say: shows a line to the user.
    """

    check: Callable[[], None]
    say: Callable[[str], None]
    stall_timeout_s: float

    def wait_until(
        self,
        attempt: Callable[[], _Result | None],
        what: str,
        describe: Callable[[], str],
        *,
        pause_s: float = 0.0,
        limit: Limit | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> _Result:
        """Call `attempt` until it returns something, and return that.

        Args:
            what: is waited for.
            describe: says who waits for whom.
            pause_s: sleep between attempts, for those that do not wait themselves.
            limit: takes the place of `stall_timeout_s`.
            progress: the time begins anew when what it returns changes.
        """
        limit_s, key = limit or Limit(self.stall_timeout_s, "pipeline.stall_timeout_s")
        before = progress()
        started = changed = said = time.monotonic()
        while (result := attempt()) is None:
            self.check()
            now = time.monotonic()
            if before != (before := progress()):
                changed = now
            if now - changed > limit_s:
                log_stacks(f"no progress for {limit_s:.0f} s")
                raise StalledError(f"waited {limit_s:.0f} s for {what} without progress ({key}): {describe()}")
            if now - said > _SAY_EVERY_S:
                said = now
                self.say(f"waiting for {what} ({now - started:.0f} s): {describe()}")
            time.sleep(pause_s)
        return result


def write_when_there_is_room(write: Callable[[], None], waits: WaitPolicy, folder: Path, what: str) -> None:
    """Call `write`, again and again while the disk of `folder` is too full for it.

    Args:
        what: is written.
    """

    def attempt() -> bool | None:
        try:
            write()
        except Exception as error:
            if not out_of_space(error, folder):
                raise
            return None
        return True

    waits.wait_until(attempt, f"room for {what}", lambda: "the disk of run_dir is full", pause_s=_PAUSE_S)
