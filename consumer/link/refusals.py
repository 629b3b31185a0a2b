"""The judgement whether a producer is left that can serve what the trainer publishes.

Guarantee: a run ends with `PolicyRefusedError`, which names the producers and reasons, when every connected producer refuses the
newest policies for good, `swap.max_refused` of them in a row, or until no group of the served policies may be trained any
more. A producer that refuses what another one has served is at fault itself and proves nothing about the policy. The run waits
while there is one that serves, tries, or failed for a reason that may pass; and for a moment in which others may come back,
unless no producer has served before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consumer.link.sessions import ProducerSession
from protocol.errors import REFUSED_FIX, PolicyRefusedError
from protocol.wire.messages import Heartbeat

_MOST_NAMED = 4  # producers in the message


@dataclass(eq=False)
class RefusalWatch:
    """The refusals that this trainer process has heard of. The intake's thread notes, the main thread checks.

    Args:
        settle_s: in which a producer that has lost its connection or its trainer comes back.
        is_resumed: producers have served versions of the trainer process before.
    """

    max_refused: int = 3
    settle_s: float = 0.0
    is_resumed: bool = False
    clock: Callable[[], float] = time.monotonic
    served: int = -1  # the newest version that any producer has served
    _since: float | None = None  # when the main thread first saw that no producer is left

    def note(self, heartbeat: Heartbeat, newest: int) -> None:
        """Note what a producer serves. A version above `newest` is one of another trainer process."""
        if heartbeat.policy_version <= newest:
            self.served = max(self.served, heartbeat.policy_version)

    def count(self, sessions: Sequence[ProducerSession]) -> int:
        """Return how many versions in a row every one of these producers refuses for good, and no other producer has served."""
        return min((self._proven(session.heartbeat) for session in sessions), default=0)

    def check(self, sessions: Sequence[ProducerSession], newest: int, oldest_usable: int | None) -> None:
        """Raise PolicyRefusedError if no producer is left that serves what is needed.

        Args:
            sessions: all connected producers.
            newest: the newest published version.
            oldest_usable: the oldest version whose groups may still be trained; None while a batch may be there without more.
        """
        why, now = self._why(sessions, newest, oldest_usable), self.clock()
        if not why:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        is_first = self.served < 0 and not self.is_resumed
        if is_first or now - self._since >= self.settle_s:
            raise PolicyRefusedError(
                f"every producer refuses the policy, {why}: {_named(sessions)}. {REFUSED_FIX}, then the trainer with --resume: "
                "what was trained is kept"
            )

    def _why(self, sessions: Sequence[ProducerSession], newest: int, oldest_usable: int | None) -> str:
        count, beats = self.count(sessions), [session.heartbeat for session in sessions]
        if count >= self.max_refused:
            return f"{count} versions in a row (swap.max_refused)"
        if count == 0 or oldest_usable is None or any(beat.refused_version != newest for beat in beats):
            return ""
        served = max(beat.policy_version for beat in beats)
        if served < 0:
            return "and none serves any version"
        old = f"and groups of v{served} are too old to be trained (pipeline.max_staleness)"
        return old if served < oldest_usable else ""

    def _proven(self, beat: Heartbeat) -> int:
        """Return how many versions a producer refuses, 0 if another one has served one of them."""
        return beat.num_refused if beat.num_refused <= beat.refused_version - self.served else 0


def _named(sessions: Sequence[ProducerSession]) -> str:
    def one(session: ProducerSession) -> str:
        beat = session.heartbeat
        serves = f"serves v{beat.policy_version}" if beat.policy_version >= 0 else "serves none"
        return f"{session.name}, which {serves}, refuses v{beat.refused_version}: {beat.refusal}"

    more = f"; and {len(sessions) - _MOST_NAMED} more producers" if len(sessions) > _MOST_NAMED else ""
    return "; ".join(one(session) for session in sessions[:_MOST_NAMED]) + more
