"""Warnings about what peers do, without a flood.

Guarantee: the first few of a kind are shown, then one in a hundred with the count.
"""

import logging
from collections import Counter

_SHOWN_PER_KIND = 5


class Throttle:
    """Call it with a kind and a text."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._count: Counter[str] = Counter()

    def __call__(self, kind: str, text: str) -> None:
        self._count[kind] += 1
        count = self._count[kind]
        if count <= _SHOWN_PER_KIND:
            self._logger.warning("%s", text)
        elif count % 100 == 0:
            self._logger.warning("%s (%d of this kind so far)", text, count)
