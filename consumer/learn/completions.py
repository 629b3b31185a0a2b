"""The completions of a batch, as TRL logs them (`trainer.log_completions`).

Guarantee: console, file and trackers get the columns of `trl.GRPOTrainer`. Nothing that is trained changes.
"""

import importlib.util
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.trainer.utils import print_prompt_completions_sample

from replay.groups import RolloutGroup


def log_completions(trainer: Any, groups: list[RolloutGroup]) -> None:
    """Print some completions of these groups, write all to a parquet file, and send them to trackers, as TRL does."""
    step, tokenizer = trainer.state.global_step, trainer.processing_class
    table: dict[str, list[Any]] = {"step": [], "prompt": [], "completion": []}
    for group in groups:
        ids = [group.completion_ids[group.last_record(number)] for number in range(group.num_completions)]
        table["step"] += [step] * len(ids)
        table["prompt"] += [tokenizer.decode(group.prompt_ids)] * len(ids)
        table["completion"] += tokenizer.batch_decode(ids)
    rewards = {
        name: [value for group in groups for value in group.rewards[:, column].tolist()]
        for column, name in enumerate(trainer.reward_names)
    }
    advantages = trainer.advantages.tolist() if groups else []
    shown = trainer.args.num_completions_to_print
    if importlib.util.find_spec("rich") is not None:
        print_prompt_completions_sample(table["prompt"], table["completion"], rewards, advantages, step, shown)
    rows = Dataset.from_dict(table | rewards | {"advantage": advantages})
    folder = Path(trainer.args.output_dir) / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(folder / f"completions_{step:05d}.parquet")
    frame = rows.to_pandas()
    if trainer.args.log_unique_prompts:
        frame = frame.drop_duplicates("prompt")
    for name in {"wandb", "trackio"} & set(trainer.args.report_to):
        tracker = importlib.import_module(name)
        if name == "trackio" or tracker.run is not None:
            tracker.log({"completions": tracker.Table(dataframe=frame)})
