"""The command lines of a run's daemons, as its actors start them.

Guarantee: pure; no argument is a secret.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.cluster.fleet.plan import TRAINER, Plan

_SCRIPTS = {"rl-trainer": "consumer.app.cli", "rl-producer": "producer.cli"}


def daemon_command(plan: Plan, name: str, gpus: Sequence[str], folder: Path, keys: Path) -> list[str]:
    """
    Args:
        gpus: as `--gpu` takes them; those that Ray gave the actor.
        folder: of the daemon, on its node.
        keys: of a producer.
    """
    return trainer_command(plan, gpus) if name == TRAINER else producer_command(plan, name, gpus, folder, keys)


def trainer_command(plan: Plan, gpus: Sequence[str]) -> list[str]:
    ranks = [] if gpus else ["--ranks", str(plan.ranks)]
    return [*_program("rl-trainer", gpus), "--config", plan.config, *_set(*plan.overrides), "--resume", *ranks]


def producer_command(plan: Plan, name: str, gpus: Sequence[str], folder: Path, keys: Path) -> list[str]:
    """Its node needs no file of the run: configuration and code come from the trainer."""
    model = ["--model", plan.model] if plan.model else []
    own = _set(*plan.producer_overrides, f"transport.identity={name}", f"run_dir={folder}")
    return [*_program("rl-producer", gpus), "--connect", plan.endpoint, "--keys", str(keys), *model, *own]


def _program(script: str, gpus: Sequence[str]) -> list[str]:
    """By its module, because the folder of scripts need not be on the path of Ray's workers."""
    return [sys.executable, "-P", "-m", _SCRIPTS[script], "--gpu", ",".join(gpus) or "cpu"]


def _set(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]
