"""Resident memory of processes, while something is done to them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def memory_bounded(bound_mb: float, *process_ids: int) -> Iterator[None]:
    """None of them may ever hold so much more than before."""
    processes, ended = [psutil.Process(one) for one in process_ids], threading.Event()
    before = [process.memory_info().rss for process in processes]
    grown = [0]

    def watch() -> None:
        while not ended.wait(0.01):
            now = [process.memory_info().rss for process in processes]
            grown.append(max(b - a for a, b in zip(before, now, strict=True)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    print(f"memory grew by {max(grown) / 2**20:.1f} MB")
    assert max(grown) < bound_mb * 2**20
