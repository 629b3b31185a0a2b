"""One rank of a trainer that shares its base, for `test_sharded_base`. Its arguments are rank, world, port, folder and model.

It takes one step for each case, in float64, alone and then with the others, and writes how far apart the two are to
`FOLDER/rank-RANK.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from consumer.ranks.exchange import ProcessRanks
from consumer.ranks.rendezvous import connect
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.float64 import in_float64
from tests.unit.consumer.learn.test_loss_parity import off_policy, some_groups
from tests.unit.consumer.ranks.test_parity import OPTIONS, of_step
from tests.unit.consumer.trl_reference import slipstream_trainer

MANY_PASSES, FEW_PASSES = (
    10,
    30,
)  # tokens of a micro-batch: ranks have different numbers of them; prompts are worth sharing
CASES: dict[str, tuple[dict[str, Any], int]] = {
    **{loss_type: ({"loss_type": loss_type}, MANY_PASSES) for loss_type in ("grpo", "bnpo")},
    **{name: (OPTIONS[name], MANY_PASSES) for name in ("kl", "entropy quantile", "truncated", "two iterations")},
}
CASES["few passes"] = {"loss_type": "dapo"}, FEW_PASSES
CASES["checkpointing"] = {"gradient_checkpointing": True}, MANY_PASSES
CASES["checkpointing by memory"] = {"gradient_checkpointing": None}, MANY_PASSES


def compare(ranks: ProcessRanks, folder: Path, model: Path, options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    pipeline = {"shard_base": "layers", "trainer_tokens_per_micro_batch": max_tokens}
    config = run_config(folder, model, trainer=options, correction={"ratio_max": 1.5}, pipeline=pipeline)
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


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    folder, model = map(Path, sys.argv[4:6])
    torch.set_num_threads(1)
    ranks = ProcessRanks(connect("127.0.0.1", port), rank, world, torch.device("cpu"), 60)
    with in_float64():
        found = {
            name: compare(ranks, folder, model, options, max_tokens) for name, (options, max_tokens) in CASES.items()
        }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
