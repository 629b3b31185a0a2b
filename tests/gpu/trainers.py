"""Trainers on the stand-in GPU, fed with batches that a test makes up."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from consumer.learn.options import build_arguments, build_lora
from consumer.learn.trainer import SlipstreamTrainer
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.learn.test_distillation_steps import with_top

COMPLETIONS = ([3, 9], [4, 5], [6], [7, 8])
"""Of each of the two groups of a step."""


def trainer(
    folder: Path,
    model: Path,
    *,
    steps: int = 1,
    dtype: str = "bfloat16",
    completions: Sequence[list[int]] = COMPLETIONS,
    prompt: list[int] | None = None,
    sampled: int | None = None,
    model_options: dict[str, Any] | None = None,
    on_gpu: bool = True,
    by_memory: bool = False,
    **sections: Any,
) -> SlipstreamTrainer:
    """A trainer of so many steps, each of two groups with these completions.

    Args:
        sampled: so many of the last tokens of a completion are in the loss; None: all. Triton's interpreter takes milliseconds
            for each of them.
        model_options: change the section `model`.
        by_memory: gradient checkpointing is chosen by the memory of the card.
        sections: change the other sections of the configuration.
    """
    sections["trainer"] = {"max_steps": steps, "save_strategy": "no"} | sections.get("trainer", {})
    sections["sampling"] = {"max_completion_length": max(map(len, completions))} | sections.get("sampling", {})
    config = run_config(folder, model, dtype, **sections)
    config = config.model_copy(update={"model": config.model.model_copy(update=model_options or {})})
    if by_memory:
        del config.trainer["gradient_checkpointing"]

    in_loss = None
    if sampled is not None:
        in_loss = [[False] * (len(ids) - sampled) + [True] * min(sampled, len(ids)) for ids in completions]

    iterations = sections["trainer"].get("num_iterations", 1)

    def batches() -> Iterator[TrainingBatch]:
        for number in range(-(-steps // iterations)):
            groups = [
                rollout_group(list(completions), lease_id=f"s-{number}-{i}", prompt=prompt, sampled=in_loss)
                for i in range(2)
            ]
            if config.distillation is not None:
                groups = with_top(groups, config.distillation.num_top)
            yield TrainingBatch(number + 1, iterations, (number + 1) * iterations, groups, len(groups))

    return SlipstreamTrainer(
        config,
        build_arguments(config, on_gpu=on_gpu, num_prompts=8),
        build_lora(config),
        model,
        batches(),
        lambda step, staged, write: write(),
    )
