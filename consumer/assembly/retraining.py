"""Training again from the journal of another run: everything but the model. Wiring only."""

from collections import Counter
from pathlib import Path

import torch

from consumer.checkpoints import folders as checkpoints
from consumer.training.heartbeat import Heartbeat
from consumer.training.pipeline import Connections
from consumer.training.retraining import RecordedFeed, RecordedRun, RetrainingPipeline
from consumer.training.run_components import RunComponents, RunStart
from consumer.waiting import Patience, ThreadErrors
from protocol.service import logs
from protocol.service.exposition import Watch


def retraining(
    components: RunComponents, recorded: RecordedRun, watch: Watch, *, resume: bool
) -> tuple[RunStart, Connections, Heartbeat, Counter[str]]:
    """Where it starts, what the loop is connected to, and what counts the groups."""
    config = components.config
    run_id = recorded.check(components.facts("?"))
    logs.bind(run=run_id)
    torch.set_num_threads(recorded.num_threads)
    checkpoints.clear_leftovers(config.checkpoints_dir)
    run_dir, folder = Path(config.run_dir), config.checkpoints_dir
    start = RunStart(run_id, checkpoints.starting_point(run_dir, folder, has_groups=False, resume=resume))
    counts: Counter[str] = Counter()
    report = components.report(counts, start.step, watch.registry)
    heartbeat = Heartbeat(watch.health, components.stop, ThreadErrors())
    patience = Patience(check=heartbeat.check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
    feed = RecordedFeed(recorded, components.shape, heartbeat.check, start.step, counts)
    return start, Connections(feed, RetrainingPipeline(), report, patience), heartbeat, counts
