"""The link's events, brought over to the asyncio loop.

Guarantee: every event is acted on by the loop's thread, in the order in which the link told them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from producer.interfaces import DownloadedPolicy
from producer.policies.registry import AdapterRegistry
from producer.rollouts.engine_access import PolicyGate
from producer.rollouts.generation import Generation
from protocol.wire.messages import Lease, PolicyInfo


class LoopEvents:
    """`LinkEvents` of a producer. Made on the loop, called on the link's thread.

    Args:
        forget: called when another trainer process begins a session, because versions may mean other weights then.
        ended: called when the link has ended, with its error.
    """

    def __init__(
        self,
        generation: Generation,
        gate: PolicyGate,
        registry: AdapterRegistry,
        forget: Sequence[Callable[[], None]],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._gate = gate
        self._registry = registry
        self._forget = forget
        self._ended = ended

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def run_began(self, policy: PolicyInfo) -> None:
        self._call(self._generation.abandon_all)
        self._call(self._start_session, policy)

    def session_began(self, policy: PolicyInfo) -> None:
        self._call(self._generation.hand_back_above, policy.version)
        self._call(self._start_session, policy)

    def _start_session(self, policy: PolicyInfo) -> None:
        self._registry.start_session(policy)
        for forget in self._forget:
            forget()

    def leased(self, lease: Lease) -> None:
        self._call(self._generation.start, lease)

    def abandoned(self, lease_id: str) -> None:
        self._call(self._generation.abandon, lease_id)

    def policy_arrived(self, downloaded: DownloadedPolicy) -> None:
        self._call(self._registry.offer, downloaded)

    def policy_refused(self, policy: PolicyInfo, reason: str) -> None:
        self._call(self._registry.refuse, policy.version, reason)

    def fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None:
        if downloaded is None:
            self._call(self._registry.on_unavailable, policy)
        else:
            self._call(self._registry.on_fetched, downloaded)

    def evaluates(self, policy: PolicyInfo | None) -> None:
        self._call(self._registry.note_evaluation, policy)

    def outbox_full(self, full: bool) -> None:
        self._call(self._gate.pause, full)

    def ended(self, error: BaseException | None) -> None:
        self._call(self._ended, error)
