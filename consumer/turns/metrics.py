"""Whose turn it is on a shared GPU, as metrics.

Guarantee: read at the scrape. Without turns the phases are all 0 and their age is not known.
"""

import math

from prometheus_client import CollectorRegistry

from consumer.turns.arbiter import PHASES
from consumer.turns.turns import GpuTurns
from protocol.runtime.metrics import Readings


def watch_turns(registry: CollectorRegistry, turns: GpuTurns | None) -> None:
    """None is for a run without."""
    readings = Readings(registry)
    readings.gauges(
        "rl_trainer_gpu_turn",
        "1 for whose turn it is on the GPU (with pipeline.gpu: turns): the producers', the trainer's, or changing while "
        "producers leave it.",
        "side",
        lambda: {str(phase): float(turns is not None and turns.phase()[0] == phase) for phase in PHASES},
    )
    readings.gauge(
        "rl_trainer_gpu_turn_age_seconds",
        "For how long that has been so.",
        lambda: turns.phase()[1] if turns else math.nan,
    )
    readings.counters(
        "rl_trainer_gpu_turn_seconds_total",
        "Time of each since the trainer started.",
        "side",
        lambda: {str(phase): turns.spent_s()[phase] if turns else 0.0 for phase in PHASES},
    )
