"""An action of a process that dies before a chosen change of the disk."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest


class Crash(BaseException):
    """The process dies here."""


def dies(action: Callable[[], object], number: int, changes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run `action` in a process that ends before its change `number` (from 0) of the disk. Return whether it got that far.

    `changes` are the functions of `os` that count as a change.
    """
    left = number

    def mortal(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return original(*args, **options)

        return change

    with monkeypatch.context() as patched:
        for name in changes:
            patched.setattr(os, name, mortal(getattr(os, name)))
        try:
            action()
        except Crash:
            return True
    return False
