"""The link's events, brought over to the asyncio loop.

Guarantee: every event is acted on by the loop's thread, in the order in which the link told them.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from producer.policies.registry import AdapterRegistry
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.generation import Generation
from protocol.wire.messages import PolicyInfo


class LoopEvents:
    """`LinkEvents` of a producer. Made on the loop, called on the link's thread.

    Args:
        forget: called when another trainer process begins a session, because versions may mean other weights then.
        ended: called when the link has ended, with its error.
    """

    def __init__(
        self,
        generation: Generation,
        access: EngineAccess,
        registry: AdapterRegistry,
        forget: Sequence[Callable[[], None]],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        loop = asyncio.get_running_loop()

        def on_loop(function: Callable[..., None]) -> Callable[..., Any]:
            return partial(loop.call_soon_threadsafe, function)

        def begin_run(policy: PolicyInfo) -> None:
            generation.abandon_all()
            start_session(policy)

        def go_on(policy: PolicyInfo) -> None:
            generation.hand_back_above(policy.version)
            start_session(policy)

        def start_session(policy: PolicyInfo) -> None:
            registry.start_session(policy)
            for part in forget:
                part()

        self.run_began = on_loop(begin_run)
        self.session_began = on_loop(go_on)
        self.leased = on_loop(generation.start)
        self.abandoned = on_loop(generation.abandon)
        self.policy_arrived = on_loop(registry.offer)
        self.policy_refused = on_loop(registry.refuse)
        self.fetched = on_loop(registry.on_fetched)
        self.evaluates = on_loop(registry.note_evaluation)
        self.outbox_full = on_loop(access.pause)
        self.ended = on_loop(ended)
