"""TRL's trainer of completions, with checkpoints that are whole, LoRA+, and packed batches that count rows.

Guarantee: a kill at any time leaves the newest committed checkpoint, and training from it ends with the same weights.
"""

from pathlib import Path
from typing import Any

from peft.optimizers import create_loraplus_optimizer
from trl import SFTTrainer

from consumer.learn import checkpoints


class WarmStartTrainer(SFTTrainer):
    """Writes checkpoints below `args.output_dir`, of which it keeps the newest.

    Args:
        loraplus_lr_ratio: learning rate of matrices B over that of A (https://arxiv.org/abs/2402.12354); None: they are equal.
        inputs: names what trains, in each checkpoint.
        of_trl: arguments of `SFTTrainer`.
    """

    optimizer: Any

    def __init__(self, *, loraplus_lr_ratio: float | None, inputs: str, **of_trl: Any) -> None:
        self._ratio, self._inputs = loraplus_lr_ratio, inputs
        num_rows = len(of_trl["train_dataset"])
        super().__init__(**of_trl)
        self.rows_per_sequence = num_rows / len(self.train_dataset)
        if self.args.packing:
            size = self.args.per_device_train_batch_size / self.rows_per_sequence
            self.args.per_device_train_batch_size = max(1, round(size))

    @property
    def rows_per_step(self) -> float:
        """Rows of a step, on average."""
        sequences = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return float(min(sequences, len(self.train_dataset)) * self.rows_per_sequence)

    def create_optimizer(self, model: Any = None) -> Any:
        if self._ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        options["loraplus_weight_decay"] = self.args.weight_decay
        self.optimizer = create_loraplus_optimizer(self.model, kind, loraplus_lr_ratio=self._ratio, **options)
        return self.optimizer

    def _get_output_dir(self, trial: Any) -> str:
        return str(checkpoints.staging(Path(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        step, folder = self.state.global_step, Path(self.args.output_dir)
        checkpoints.commit(checkpoints.staging(folder) / f"checkpoint-{step}", {"step": step, "run_id": self._inputs})
        checkpoints.prune(folder, keep=1)
