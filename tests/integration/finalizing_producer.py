"""`rl-producer` whose engine, while it starts, is in a finalizer, in which Python drops the exceptions of signal handlers.

Run as `python -m tests.integration.finalizing_producer` with the arguments of `rl-producer`.
"""

import time
from typing import Any

from producer.app import cli
from tests.scripted_engine import put_in_place


class Dying:
    def __del__(self) -> None:
        print("in a finalizer", flush=True)
        time.sleep(600)


def engine(config: Any, num_gpus: int) -> None:
    Dying()
    print("the signal was dropped", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    put_in_place(engine)
    cli.main()
