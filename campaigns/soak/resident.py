"""What a daemon of a soak has freed goes back to the system, so that what is resident is what it holds.

Guarantee: nothing that is in use is touched.

glibc keeps freed pages, for each thread its own, and keeps more of them the longer threads allocate in ever new order: a
trainer's resident memory rose by 5 MB/h in its first half hour, while what was in use of it (`mallinfo2`) and the number of its
Python objects hardly changed. And the cycles of half a million objects are collected so rarely that they look like growth.
"""

import ctypes
import gc
import threading
import time

_EVERY_S = 10.0


def keep_to_what_is_held() -> None:
    threading.Thread(target=_give_back, name="resident", daemon=True).start()


def _give_back() -> None:
    libc = ctypes.CDLL(None)
    while True:
        time.sleep(_EVERY_S)
        gc.collect()
        libc.malloc_trim(0)
