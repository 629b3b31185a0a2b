"""Which policies are downloaded, and for what: to serve the newest one, or because one is evaluated.

Guarantee: every policy that is announced is handed over exactly once, unless a newer one supersedes it or it does not fit the
memory, and again after `forget_announcement`; a policy that is asked for is answered, with its bytes or with None. What serves
both purposes is downloaded once. A source that does not have an announced policy is asked again when it is announced again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import psutil

from producer.policies.loader import DownloadedPolicy
from protocol.wire.messages import GpuTurn, Lease, PolicyInfo


@dataclass(frozen=True)
class LinkEvents:
    """What the link tells the rest of the producer, on its own thread."""

    run_began: Callable[[PolicyInfo], object]  # one not served here before; every lease of the one before is void
    session_began: Callable[
        [PolicyInfo], object
    ]  # of another process of the run; its newest version may be an older one
    leased: Callable[[Lease], object]
    abandoned: Callable[[str], object]  # the trainer does not want this lease's group any more
    policy_arrived: Callable[[DownloadedPolicy], object]
    policy_refused: Callable[[PolicyInfo, str], object]  # it is not taken from the trainer, for this reason
    fetched: Callable[[PolicyInfo, DownloadedPolicy | None], object]  # what was asked for; None: the trainer lacks it
    evaluates: Callable[[PolicyInfo | None], object]  # which policy the trainer evaluates now; said again and again
    turn: Callable[[GpuTurn | None], object]  # whose turn it is on the GPU that both share; said again and again
    outbox_full: Callable[[bool], object]  # said when it changes: while it is full, no generation may begin
    ended: Callable[
        [BaseException | None], object
    ]  # the last one; None: the trainer has finished, or `stop` was called


logger = logging.getLogger(__name__)

Purpose = Literal["newest", "evaluation"]
Done = Callable[[DownloadedPolicy | None], None]


class PolicySource(Protocol):
    def fetch(self, policy: PolicyInfo, done: Done) -> None:
        """Begins a download. Calls `done` once, with None if the source does not have the policy; never after `cancel`."""

    def cancel(self, digest: str) -> None:
        """Ends the download of this policy, if there is one."""


@dataclass
class PolicyDownloads:
    """Belongs to the link's thread. `events` is told what was downloaded, or why it cannot be."""

    source: PolicySource
    events: LinkEvents
    free_memory: Callable[[], int] = lambda: psutil.virtual_memory().available
    _announced: PolicyInfo | None = None
    _wanted: dict[str, dict[Purpose, PolicyInfo]] = field(default_factory=dict)  # by digest, what is being downloaded

    def announce(self, policy: PolicyInfo) -> None:
        """The trainer's newest policy. It is announced again and again, and only a change has an effect."""
        if policy == self._announced:
            return
        self._announced = policy
        if (refusal := self._begin("newest", policy)) is not None:
            self.events.policy_refused(policy, refusal)

    def forget_announcement(self, policy: PolicyInfo) -> None:
        """The next announcement of this policy begins a download, although it was announced before."""
        if policy == self._announced:
            self._announced = None

    def request(self, policy: PolicyInfo) -> None:
        """A policy that is to be evaluated, in place of the one requested before."""
        if self._wanted.get(policy.digest, {}).get("evaluation") == policy:
            return
        if (refusal := self._begin("evaluation", policy)) is not None:
            logger.error("policy v%d cannot be evaluated here: %s", policy.version, refusal)
            self.events.fetched(policy, None)

    def forget(self) -> None:
        """Another trainer process may give the same version another meaning. Whoever requested a policy requests it again."""
        self._announced = None
        for digest in self._wanted:
            self.source.cancel(digest)
        self._wanted.clear()

    def _begin(self, purpose: Purpose, policy: PolicyInfo) -> str | None:
        """Returns why the policy cannot be downloaded, or None."""
        for digest, purposes in list(self._wanted.items()):
            if purposes.pop(purpose, None) is not None and not purposes and digest != policy.digest:
                self.source.cancel(digest)
                del self._wanted[digest]
        if policy.digest not in self._wanted:
            free = self.free_memory()
            if 2 * policy.num_bytes > free:  # for its chunks and for what they are put together to
                return (
                    f"it is {policy.num_bytes} bytes large, and taking it needs twice that: this host has {free} bytes of "
                    "memory free. Give it more, or train a smaller adapter (lora.r)"
                )
            self._wanted[policy.digest] = {purpose: policy}
            self.source.fetch(policy, partial(self._done, policy.digest))
        self._wanted[policy.digest][purpose] = policy
        return None

    def _done(self, digest: str, downloaded: DownloadedPolicy | None) -> None:
        for purpose, policy in self._wanted.pop(digest).items():
            found = downloaded and downloaded._replace(policy=policy)
            if purpose == "evaluation":
                self.events.fetched(policy, found)
            elif found is not None:
                self.events.policy_arrived(found)
            else:
                self._announced = None  # the next announcement names a policy that exists
