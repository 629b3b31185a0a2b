"""`rl-trainer`, for a soak.

Guarantee: but for `campaigns.soak.resident` it is the real command.
"""

from typing import Any

from campaigns.chaos.trainer_child import preload
from campaigns.soak import resident

__all__ = ["main", "preload"]


def main(request: dict[str, Any]) -> None:
    resident.keep_to_what_is_held()
    from consumer.app import cli

    cli.main()
