"""On the path of every Python of a cluster under test: `rl-producer` gets an engine that needs no model, and the ranks of
`rl-trainer` are forks of it, which need not import its libraries again.

Guarantee: no other process is changed. Everything around the engine is the product's own.
"""

import sys

if "producer.cli" in sys.orig_argv:
    from tests.scripted_engine import Pace, install

    install(Pace(fast_s=0.03, slow_s=0.1, share_slow=0.2))
elif "consumer.cli" in sys.orig_argv:
    from tests.chaos.forked_ranks import forked_ranks
    from tests.chaos.trainer_child import preload

    preload()
    forked_ranks(sys.orig_argv)
