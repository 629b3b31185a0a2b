"""On the path of every Python of a cluster under test: `rl-producer` gets an engine that needs no model, and the ranks of
`rl-trainer` are forks of it, which need not import its libraries again. Where `CLUSTER_EVIDENCE` names a folder, both write there
what they did, as in `campaigns.chaos`. Where `CLUSTER_WARM` names a Python, that one runs `rl-trainer`.

Guarantee: no other process is changed. Everything around the engine is the product's own.
"""

import os
import sys
import time
from pathlib import Path


def _evidence(role: str):
    from campaigns.chaos.evidence import EvidenceLog

    return EvidenceLog(Path(os.environ["CLUSTER_EVIDENCE"]) / f"{role}-{time.time_ns()}.jsonl")


if "producer.app.cli" in sys.orig_argv:
    from tests.scripted_engine import Pace, install

    install(Pace(fast_s=0.03, slow_s=float(os.environ.get("CLUSTER_SLOW_S", "0.1")), share_slow=0.2))
    if "CLUSTER_EVIDENCE" in os.environ:
        from campaigns.chaos import producer_child
        from campaigns.chaos.aims import Aim

        producer_child._watch(_evidence("producer"), Aim())
elif "consumer.app.cli" in sys.orig_argv:
    if warm := os.environ.get("CLUSTER_WARM"):
        os.execv(warm, [warm, *sys.orig_argv[1:]])
    from campaigns.chaos import trainer_child
    from campaigns.chaos.forked_ranks import forked_ranks

    trainer_child.preload()
    forked_ranks(sys.orig_argv)
    if "CLUSTER_EVIDENCE" in os.environ:
        trainer_child._write_evidence(_evidence("trainer"))
