"""A plan and reports of a run in a cluster, for tests."""

from pathlib import Path
from typing import Any

import msgspec

from slipstream_extras.ray.plan import DaemonReport, Plan

PLAN = Plan(
    run_dir="/runs/a",
    config="/home/u/run.yaml",
    folder="/home/u",
    overrides=["pipeline.max_staleness=2"],
    ranks=2,
    on_gpus=True,
    gpus=1,
    cpus=4,
    host="10.0.0.5",
    endpoint="tcp://10.0.0.5:20000",
    keys="/runs/a/cluster/keys",
    producers=2,
    least=0,
    most=0,
)


def plan(folder: Path | None = None, **changes: Any) -> Plan:
    """With its run in `folder`."""
    if folder is not None:
        changes |= {"run_dir": str(folder), "keys": str(folder / "keys"), "folder": str(folder)}
    return msgspec.structs.replace(PLAN, **changes)


def report(name: str, phase: str = "running", **fields: Any) -> DaemonReport:
    return DaemonReport(**{"name": name, "phase": phase, "node": "10.0.0.6", "starts": 1} | fields)
