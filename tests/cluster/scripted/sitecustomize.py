"""On the path of every Python of a cluster under test: `rl-producer` gets an engine that needs no model.

Guarantee: no other process is changed. Everything around the engine is the product's own.
"""

import sys

if "producer.cli" in sys.orig_argv:
    from tests.scripted_engine import Pace, install

    install(Pace(fast_s=0.03, slow_s=0.1, share_slow=0.2))
