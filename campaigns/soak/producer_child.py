"""`rl-producer` around the scripted engine, for a soak; with leaks where the harness asks for them.

Guarantee: but for the engine, the leaks and `campaigns.soak.resident` it is the real command.
"""

from typing import Any

from campaigns.chaos.producer_child import preload
from campaigns.soak import leaks, resident
from tests import scripted_engine

__all__ = ["main", "preload"]

_PACE = scripted_engine.Pace(fast_s=0.2, slow_s=2.0, share_slow=0.1)  # leaves the cores time for what is measured


def main(request: dict[str, Any]) -> None:
    scripted_engine.install(_PACE, request["seed"])
    resident.keep_to_what_is_held()
    if request["plant"]:
        leaks.plant()
    from producer.app import cli

    cli.main()
