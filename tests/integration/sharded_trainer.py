"""One rank of a trainer that shares its base, for `test_sharded_base`. Its arguments are rank, world, port, folder and model.

It takes one step for each case, in float64, alone and then with the others, and writes how far apart the two are to
`FOLDER/rank-RANK.json`. Of weights that train themselves it takes two, the second one also from a checkpoint:
`FOLDER/continued-RANK.json`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from consumer.learn.checkpoints import staging
from consumer.learn.shards import without_weights
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.weight_snapshots import whole
from consumer.ranks.exchange import Gather, ProcessRanks
from consumer.ranks.rendezvous import connect
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.float64 import in_float64
from tests.unit.consumer.learn.test_loss_parity import off_policy, some_groups
from tests.unit.consumer.ranks.test_parity import OPTIONS, of_step
from tests.unit.consumer.trl_reference import slipstream_trainer

MANY_PASSES, FEW_PASSES = (
    10,
    30,
)  # tokens of a micro-batch: ranks have different numbers of them; prompts are worth sharing
CASES: dict[str, tuple[Any, ...]] = {
    **{loss_type: ({"loss_type": loss_type}, MANY_PASSES) for loss_type in ("grpo", "bnpo")},
    **{name: (OPTIONS[name], MANY_PASSES) for name in ("kl", "entropy quantile", "truncated", "two iterations")},
}
CASES["few passes"] = {"loss_type": "dapo"}, FEW_PASSES
CASES["checkpointing"] = {"gradient_checkpointing": True}, MANY_PASSES
CASES["checkpointing by memory"] = {"gradient_checkpointing": None}, MANY_PASSES


WHOLE: dict[str, tuple[Any, ...]] = {
    "whole weights": ({"bf16": False}, FEW_PASSES, []),
    "whole weights, recomputed": (
        {"bf16": False, "gradient_checkpointing": True, "beta": 0.1, "num_iterations": 2},
        MANY_PASSES,
        [],
    ),
    "some weights": ({"bf16": False}, MANY_PASSES, ["*norm*", "*.mlp.*"]),
}

CONTINUED = ("adamw_torch_fused", "sdpa"), ("adagrad", "eager")  # trees of rows, and padded rows
"""Optimizers, with the attention of the model."""


def compare(
    ranks: ProcessRanks,
    folder: Path,
    model: Path,
    options: dict[str, Any],
    max_tokens: int,
    trainable: list[str] | None = None,
) -> dict[str, Any]:
    pipeline = {"shard_base": "layers" if trainable is None else "auto", "trainer_tokens_per_micro_batch": max_tokens}
    sections = {} if trainable is None else {"lora": None, "dtype": "bfloat16", "trainable": trainable}
    config = run_config(folder, model, trainer=options, correction={"ratio_max": 1.5}, pipeline=pipeline, **sections)
    if options.get("gradient_checkpointing", False) is None:  # as if the file did not have it
        del config.trainer["gradient_checkpointing"]
    alone = slipstream_trainer(config, model)
    groups = off_policy(alone, some_groups(2))
    loss, gradient, metrics = of_step(alone, groups)
    trainer = slipstream_trainer(config, model, ranks)
    if trainer.args.gradient_checkpointing:  # transformers does so when it begins to train
        trainer.model.gradient_checkpointing_enable()
    of_ranks = of_step(trainer, groups)
    parameters = [
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter)
        for parameter in trainer.model.parameters()
    ]
    return {
        "loss": [loss, of_ranks[0]],
        "largest": float(gradient.abs().max()),
        "gradient": float((of_ranks[1] - gradient).abs().max()),
        "metrics": [metrics, of_ranks[2]],
        "num_micro_batches": len(trainer.recipe.tensors(groups)),
        "numbers": sum(parameter.numel() for parameter in parameters),
        "whole": sum(parameter.numel() for parameter in alone.model.parameters()),
    }


def weights(trainer: SlipstreamTrainer) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([whole(parameter).flatten() for parameter in trainer.model.parameters()])


def take_step(trainer: SlipstreamTrainer, groups: list[Any]) -> float:
    """Return the norm of the gradient, which is clipped."""

    def batches() -> Iterator[TrainingBatch]:
        if trainer._ranks.rank > 0:
            trainer._ranks.share(None)  # rank 0 has announced it
        yield TrainingBatch(1, 1, 1, groups, len(groups))

    trainer._batches = batches()
    [inputs] = trainer.get_train_dataloader()
    trainer.training_step(trainer.model, inputs, None)
    norm = trainer._get_grad_norm(trainer.model, trainer._clip_grad_norm(trainer.model))
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return norm


def go_on(ranks: ProcessRanks, folder: Path, model: Path, optimizer: str, attention: str) -> dict[str, float]:
    """Two steps of one process, of ranks, and of ranks and of one process that take the second one from a checkpoint."""
    attends = {"attn_implementation": attention}
    config = run_config(
        folder / optimizer,
        model,
        "bfloat16",
        lora=None,
        trainer={"bf16": False, "optim": optimizer, "max_grad_norm": 0.01, "model_init_kwargs": attends},
    )
    alone = slipstream_trainer(config, model)
    groups = off_policy(alone, some_groups(2))
    shared, resumed = (slipstream_trainer(config, model, ranks) for _ in range(2))
    single = slipstream_trainer(config, model)
    for trainer in (alone, shared, resumed, single):
        trainer.create_optimizer_and_scheduler(2)
    before = weights(alone)
    norms = [take_step(trainer, groups) for trainer in (alone, shared)]
    checkpoint = staging(config.checkpoints_dir) / "checkpoint-0"
    if ranks.rank == 0:
        shared._save_checkpoint(shared.model, None)
    else:
        for made in (shared.model, shared.optimizer):
            assert isinstance(ranks.share(None), Gather)
            made.state_dict()
    ranks.gather({"written": torch.zeros(1)})
    own = folder / f"{optimizer}-{ranks.rank}"
    own.mkdir()
    source = checkpoint if ranks.rank == 0 else without_weights(checkpoint, own)
    for trainer, place in ((resumed, source), (single, checkpoint)):
        trainer._load_from_checkpoint(str(place))
        trainer._load_optimizer_and_scheduler(str(place))
    for trainer in (alone, shared, resumed, single):
        take_step(trainer, groups)
    last = weights(alone)
    sent = [] if ranks.rank == 0 else tree_leaves(torch.load(own / "optimizer.pt", weights_only=True)["state"])
    state = [
        each
        for values in shared.optimizer.state.values()
        for each in values.values()
        if each is not None and each.dim()
    ]
    return {
        "moved": float((last - before).abs().max()),
        "norm": norms[1] / norms[0] - 1,
        "apart": float((weights(shared) - last).abs().max()),
        "single": float((weights(single) - last).abs().max()),
        "resumed": float((weights(resumed) - weights(shared)).abs().max()),
        "part": sum(each.to_local().numel() for each in state) / max(1, sum(each.numel() for each in state)),
        "sent": sum(each.numel() for each in sent if each is not None and each.dim() and not each.is_meta)
        + len(list(own.glob("*.safetensors"))),
    }


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    folder, model = map(Path, sys.argv[4:6])
    torch.set_num_threads(1)
    ranks = ProcessRanks(connect("127.0.0.1", port), rank, world, torch.device("cpu"), 60)
    with in_float64():
        found = {name: compare(ranks, folder, model, *case) for name, case in (CASES | WHOLE).items()}
        continued = {name: go_on(ranks, folder, model, name, *more) for name, *more in CONTINUED}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    (folder / f"continued-{rank}.json").write_text(json.dumps(continued))


if __name__ == "__main__":
    main()
