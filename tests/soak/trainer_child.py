"""`rl-trainer`, for a soak.

Guarantee: it is the real command.
"""

from typing import Any

from tests.chaos.trainer_child import preload

__all__ = ["main", "preload"]


def main(request: dict[str, Any]) -> int:
    from consumer import cli

    return cli.main()
