"""The processes that a test has started and that are still there."""

import contextlib

import psutil


class NewProcesses:
    """Lists the processes that this one has started since, and those below them.

    What is below an older child does not count: the processes of another test may be there (`tests.integration.shared_zygote`).
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children())

    def alive(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for child in set(psutil.Process().children()) - self._before:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [
                    each for each in [child, *child.children(recursive=True)] if each.status() != psutil.STATUS_ZOMBIE
                ]
        return found
