"""`python -m campaigns.cluster.record NAME PRODUCERS SLOW_S SECONDS`: what scaling sees of a run, as data for its tests.

Guarantee: the loads are those that the manager would have decided on, from the status documents of real daemons whose producers
have a scripted engine; a fifth of its groups takes up to SLOW_S seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from campaigns.chaos.run_folder import DEFAULT, prepare
from campaigns.cluster.machine import cluster_run, eventually
from slipstream_extras.ray.plan import FleetReport
from slipstream_extras.ray.scaling import Looks, answers

LOADS = Path(__file__).parents[2] / "tests/unit/slipstream_extras/ray/loads"
_EVERY_S = 5.0


def main(name: str, producers: int, slow_s: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="slipstream-cluster-") as folder:
        prepare(Path(folder), Path(folder), 1, DEFAULT)
        with cluster_run(Path(folder), 1, producers + 1, CLUSTER_SLOW_S=str(slow_s)) as run:
            run.command("up", "--config", "run.yaml", "--gpus", "0", "--producers", str(producers), "--detach")
            eventually(lambda: run.step() > 1, 900)
            looks, began, lines = Looks(), time.monotonic(), []
            while time.monotonic() - began < seconds:
                report = msgspec.convert(run.report(), FleetReport)
                looks.add(time.monotonic() - began, answers(report.daemons, time.time()))
                load = looks.load(producers, room=True)._asdict()
                lines.append(
                    {key: round(value, 3) if isinstance(value, float) else value for key, value in load.items()}
                )
                time.sleep(_EVERY_S)
            run.command("down", "--config", "run.yaml")
    (LOADS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
