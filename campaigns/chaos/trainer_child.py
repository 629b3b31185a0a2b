"""`rl-trainer`, watched: the real command, with its evidence written down and points to die at.

Guarantee: what the product does is unchanged, except for the instant of its death, under a control, and that patches of weights
get an anchor sooner. Evidence of a step is on the disk before the step's checkpoint can be.
"""

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from campaigns.chaos import controls
from campaigns.chaos.aims import Aim, TransactionPoints
from campaigns.chaos.collect import COLUMNS, REPLAY_COLUMNS, rows_of
from campaigns.chaos.evidence import EvidenceLog, digest_of_group, digest_of_weights
from campaigns.chaos.forked_ranks import forked_ranks

_GROWTH = 1.2
"""Patches of the tiny model's weights have grown so far after some five steps."""
_USED = (
    "consumer.app.daemon",
    "consumer.app.follower",
    "consumer.learn.trainer",  # before anything else imports TRL: it does so without vLLM
    "slipstream.sft",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "peft.tuners.lora",
    "safetensors.torch",
)
"""What a trainer imports before its first step."""
WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
"""The file of trained weights in a checkpoint, of an adapter or of a model."""


def preload() -> None:
    for name in _USED:
        importlib.import_module(name)


def main(request: dict[str, Any]) -> NoReturn:
    log = EvidenceLog(Path(request["evidence"]))
    others = forked_ranks(request["argv"])
    victim = others[-1].pid if request.get("at_rank") else os.getpid()
    aim = Aim(*request.get("aim", ()), victim=victim)
    _write_evidence(log)
    set_points(aim)
    control = request.get("control")
    if control:
        controls.CONTROLS[control]()
    from consumer.app import cli
    from consumer.link import patch_maker

    patch_maker.MOST_GROWTH = _GROWTH
    log.note("process", argv=request["argv"])
    cli.main()


def _write_evidence(log: EvidenceLog) -> None:
    from consumer.app.live_run import LiveRun
    from consumer.app.run import Run
    from consumer.learn import checkpoints as checkpoints
    from consumer.learn.trainer import SlipstreamTrainer
    from consumer.link.weight_snapshots import WeightSnapshot
    from replay.journal.retention import Retention

    steps = SlipstreamTrainer.get_train_dataloader

    def watched_steps(trainer: Any) -> Iterator[Any]:
        batches = trainer._batches

        def watched_batches() -> Iterator[Any]:
            log.note("start", step=trainer.state.global_step)  # the checkpoint has been read
            for batch in batches:
                groups = [[group.lease_id, digest_of_group(group)] for group in batch.groups]
                first = batch.last_step - batch.num_iterations + 1
                log.note("batch", step=first, last_step=batch.last_step, groups=groups, num_fresh=batch.num_fresh)
                yield batch

        trainer._batches = watched_batches()
        return steps(trainer)

    SlipstreamTrainer.get_train_dataloader = watched_steps

    on_step_end = Run.on_step_end

    def watched_step_end(control: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Any:
        log.note("step_end", step=state.global_step)
        return on_step_end(control, args, state, *rest, **kwargs)

    Run.on_step_end = watched_step_end

    published = WeightSnapshot.published

    def watched_published(snapshot: Any, version: int) -> Any:
        policy = published(snapshot, version)
        anchor = policy.anchor and policy.anchor.digest
        log.note("published", version=version, digest=policy.digest, anchor=anchor, weights=snapshot.noted)
        return policy

    WeightSnapshot.published = watched_published  # type: ignore[method-assign]

    for kind in (LiveRun, Run):

        def watched_submit(self: Any, step: int, version: int, snapshot: Any, _then: Any = kind.submit) -> None:
            log.note("policy", step=step, version=version, digest=_digest_of(snapshot))
            _then(self, step, version, snapshot)

        kind.submit = watched_submit

    prune = Retention.prune

    def watched_prune(self: Any, *, oldest_step: int, **settings: Any) -> int:
        """What is about to be deleted is written down first; more than that does no harm."""
        journal = self._journal
        settled = (
            f"SELECT {COLUMNS}, frame FROM groups JOIN bodies USING(seq) WHERE last_step <= ? OR outcome != 'accepted'"
        )
        for row in rows_of(journal.query(f"{settled} OR dropped IS NOT NULL", (oldest_step,))):
            if row not in written:
                log.note("row", row=dataclasses.astuple(row))
                written.add(row)
        replays = journal.query(f"SELECT {REPLAY_COLUMNS} FROM replays WHERE last_step <= ?", (oldest_step,))
        log.note("replays", rows=replays)
        return prune(self, oldest_step=oldest_step, **settings)

    written: set[Any] = set()
    Retention.prune = watched_prune

    commit = checkpoints.commit

    def watched_commit(staged: Path, state: dict[str, Any]) -> None:
        file = next(staged / name for name in WEIGHTS if (staged / name).is_file())
        weights = hashlib.sha256(file.read_bytes()).hexdigest()
        commit(staged, state)
        log.note("checkpoint", step=state["step"], weights=weights)

    checkpoints.commit = watched_commit


def _digest_of(snapshot: Any) -> str:
    """The digest of a policy, or of its weights where they are patched. The snapshot stays as it is."""
    import torch

    from consumer.link.weight_snapshots import WeightSnapshot

    if not isinstance(snapshot, WeightSnapshot):
        return str(snapshot.published(0).digest)
    bits, places = snapshot.weights.view(torch.int16).numpy(), snapshot.owner._places
    tensors = ((name, bits[place.start :][: place.size].tobytes()) for name, place in places.items())
    noted = digest_of_weights(tensors)
    snapshot.noted = noted  # type: ignore[attr-defined]
    return noted


def set_points(aim: Aim) -> None:
    from consumer.app.run import Run
    from consumer.evaluate.control import EvaluationControl
    from consumer.evaluate.results import EvaluationResults
    from consumer.learn import checkpoints as checkpoints
    from consumer.learn.trainer import SlipstreamTrainer
    from consumer.link.intake import Intake
    from consumer.link.patch_maker import PatchMaker
    from consumer.link.weight_snapshots import WeightSnapshot, WeightSnapshots
    from consumer.ranks.exchange import ProcessRanks
    from protocol.channel.server import ZmqServer
    from protocol.runtime import files as staged
    from protocol.wire.messages import Ack, Lease, PolicyOffer, Welcome
    from replay import buffer
    from replay.journal.retention import Retention
    from replay.journal.schema import JournalEntry
    from replay.journal.writer import Journal

    points = TransactionPoints(aim, Journal)
    for name in ("append", "claim", "end_step", "note_policy", "note_facts"):
        points.name(Journal, name, name)
    points.name(buffer, "recover", "recover")
    points.name(Retention, "prune", "retention")
    aim.around(JournalEntry, "crc", "append.row", None)

    send = ZmqServer.send
    names: dict[type, str] = {Ack: "ack", Lease: "lease", Welcome: "welcome", PolicyOffer: "offer"}

    def watched_send(channel: Any, peer: bytes, message: Any) -> bool:
        name = names.get(type(message))
        if name is None:
            return send(channel, peer, message)
        aim.reach(f"{name}.begin")
        sent = send(channel, peer, message)
        aim.reach(f"{name}.queued")
        aim.reach_when_sent(f"{name}.sent")
        return sent

    ZmqServer.send = watched_send

    aim.around(WeightSnapshots, "take", None, "snapshot.taken")
    aim.around(WeightSnapshot, "published", "patch.begin", "patch.made")
    aim.around(PatchMaker, "_anchor_to", "anchor.begin", "anchor.made")
    aim.around(WeightSnapshots, "save", None, "patches.saved")
    aim.around(Intake, "publish", "publish.begin", "publish.done")
    aim.around(Intake, "stop", "farewell.begin", "farewell.done")
    aim.around(Run, "on_step_begin", "step.begin", None)
    aim.around(SlipstreamTrainer, "_part_of_loss", None, "step.loss")
    aim.around(SlipstreamTrainer, "__init__", None, "model.loaded")
    aim.around(ProcessRanks, "share", "plan.begin", "plan.shared")
    aim.around(ProcessRanks, "add", "sum.begin", "sum.done")
    aim.around(checkpoints, "commit", "checkpoint.begin", "checkpoint.done")
    aim.around(checkpoints, "prune", "checkpoint.pruning", "checkpoint.pruned")

    aim.around(EvaluationControl, "wait_for_last", "evaluation.awaited", None)
    aim.around(EvaluationResults, "record", "evaluation.begin", "evaluation.recorded")

    rename, sync = Path.rename, staged.sync
    kinds = {"checkpoint": "checkpoint", ".trainer.json.partial": "summary"}
    kinds |= {".adapter.partial": "adapter", ".model.partial": "adapter"}

    def watched_sync(path: Path) -> None:
        if any(part.startswith("checkpoint-") for part in path.parts):
            aim.reach("checkpoint.syncing")
        sync(path)

    def watched_rename(path: Path, target: Any) -> Path:
        kind = kinds.get(path.name.partition("-")[0])
        is_old = Path(target).parent.name == ".deleted"
        if kind and not is_old:
            aim.reach(f"{kind}.synced")
        result = rename(path, target)
        if is_old:
            aim.reach("checkpoint.uncounted")
        elif kind:
            aim.reach(f"{kind}.renamed")
        elif path.name in ("adapter", "model"):
            aim.reach("adapter.aside")
        return result

    staged.sync = watched_sync
    Path.rename = watched_rename  # type: ignore[method-assign]
