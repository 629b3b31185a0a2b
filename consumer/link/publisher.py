"""The thread that publishes policies while the main thread trains on.

Guarantee: versions are published in the order in which they were submitted, each once; its main-thread side waits only
when two are unfinished. What ends the thread ends the run: `submit` and `flush` raise it, and every wait of the main thread.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from consumer.link.policy_store import PublishedPolicy, Snapshot
from consumer.waiting import ThreadErrors, WaitPolicy

_MAX_UNFINISHED = 2
_POLL_S = 0.25


@dataclass(eq=False)
class Publisher:
    """Starts with the first version. `publish` is called on the thread with optimizer step and policy; False: not now, try
    again. `describe` returns which side waits for which, and `errors` gets the error that ended the thread."""

    publish: Callable[[int, PublishedPolicy], bool]
    waits: WaitPolicy
    describe: Callable[[], str]
    errors: ThreadErrors
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _unfinished: deque[tuple[int, int, Snapshot]] = field(default_factory=deque)  # step, version
    _closing: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    # The main thread's side.

    def submit(self, step: int, version: int, snapshot: Snapshot) -> None:
        """Hand over the version that optimizer step `step` made."""
        self._wait_until_at_most(_MAX_UNFINISHED - 1)
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._unfinished.append((step, version, snapshot))
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything submitted is published."""
        self._wait_until_at_most(0)

    def close(self) -> None:
        """Publish what can be published at once, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait_until_at_most(self, count: int) -> None:
        def attempt() -> bool | None:
            with self._changed:
                done = self._changed.wait_for(lambda: len(self._unfinished) <= count or self.errors.first, _POLL_S)
            self.errors.check()
            return True if done else None

        self.waits.wait_until(
            attempt, "the publication of a policy", self.describe, progress=lambda: len(self._unfinished)
        )

    # The thread.

    def _run(self) -> None:
        try:
            while self._next_is_there():
                step, version, snapshot = self._unfinished[0]
                policy = snapshot.published(version)
                while not self.publish(step, policy):
                    with self._changed:
                        if self._changed.wait_for(lambda: self._closing, _POLL_S):
                            return
                with self._changed:
                    self._unfinished.popleft()
                    self._changed.notify_all()
        except BaseException as error:
            self.errors.note(error)
            with self._changed:
                self._changed.notify_all()

    def _next_is_there(self) -> bool:
        """Wait for work; False when there is none and none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished or self._closing)
            return bool(self._unfinished)
