"""A leak of every kind that a soak has to find, put into a daemon by the harness.

Guarantee: from `plant` on the process loses memory, a descriptor, a thread, a child process and a file in its own folder of
shared memory again and again, at rates that half a minute shows; the product's code is as it is.
"""

import os
import subprocess
import threading
import time

from campaigns.soak.samples import SHARED_MEMORY, scratch_of

PLANTED = ("sleep", "7200")
_EVERY_S = 0.25
_BYTES = 2**20


def plant() -> None:
    threading.Thread(target=_leak, name="planted", daemon=True).start()


def _leak() -> None:
    kept: list[object] = []
    while True:
        time.sleep(_EVERY_S)
        kept.append(b"\1" * _BYTES)
        kept.append(os.open(os.devnull, os.O_RDONLY))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        kept.append(subprocess.Popen(PLANTED))
        for folder in scratch_of(os.getpid()):
            if folder.parent == SHARED_MEMORY:
                (folder / f"planted-{len(kept)}").touch()
