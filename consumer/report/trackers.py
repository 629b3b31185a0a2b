"""The run of each tracker that all starts of a run share.

Guarantee: the trackers of `trainer.report_to` that take a run's id from a variable of the environment get the same one at every
start, unless the user has set one. The ids are kept in `run_dir`, for this run alone.
"""

import importlib
import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from protocol.runtime.files import ignore_disk_full, staged

FILE = "trackers.json"


class TrackerRuns(TrainerCallback):  # type: ignore[misc]
    """
    Args:
        run_id: of the run, which another run in the same folder does not have.
        names: as `trainer.report_to` has them.
    """

    def __init__(self, run_dir: Path, run_id: str, names: Collection[str]) -> None:
        self._file, self._names = run_dir / FILE, names
        self._ids = self._kept(run_id) or {"run": run_id, "id": secrets.token_hex(16)}

    def set_variables(self) -> None:
        """Call it before transformers makes its callbacks."""
        own = self._ids["id"]
        variables = {
            "wandb": {"WANDB_RUN_ID": own, "WANDB_RESUME": "allow"},
            "comet_ml": {"COMET_EXPERIMENT_KEY": own},
            "swanlab": {"SWANLAB_RUN_ID": own[:21], "SWANLAB_RESUME": "allow"},
            "neptune": {"NEPTUNE_CUSTOM_RUN_ID": own},
            "tensorboard": {"TENSORBOARD_LOGGING_DIR": str(self._file.parent / "checkpoints" / "runs" / own[:8])},
            "mlflow": {"MLFLOW_RUN_ID": self._ids["mlflow"]} if "mlflow" in self._ids else {},
        }
        for name, values in variables.items():
            if name in self._names and values and next(iter(values)) not in os.environ:
                for variable, value in values.items():
                    os.environ.setdefault(variable, value)
        if self._names:
            self._keep()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Keep the id that MLflow gave, which takes none from others."""
        if "mlflow" not in self._names or "MLFLOW_RUN_ID" in os.environ:
            return
        if (run := importlib.import_module("mlflow").active_run()) is not None:
            self._ids["mlflow"] = run.info.run_id
            self._keep()

    def _kept(self, run_id: str) -> dict[str, str] | None:
        try:
            kept: dict[str, str] = json.loads(self._file.read_text(encoding="utf-8"))
            return kept if kept["run"] == run_id and isinstance(kept["id"], str) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self) -> None:
        with ignore_disk_full(), staged(self._file) as partial:
            partial.write_text(json.dumps(self._ids), encoding="utf-8")
