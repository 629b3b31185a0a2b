"""Which adapter of a run is meant by `last`, `best`, a step, or a folder.

Guarantee: the chosen adapter was written whole; if there is no such adapter, the error says which ones there are.
"""

import json
from pathlib import Path

from consumer.checkpoints import folders as checkpoints
from consumer.checkpoints.adapter_folder import CONFIG_FILE
from protocol.config.run import RunConfig
from protocol.errors import ConfigError


def choose_adapter(config: RunConfig, which: str) -> Path:
    """The folder of the adapter that `which` names.

    Raises:
        ConfigError: there is no such adapter.
    """
    if which == "last":
        return _last(config)
    if which == "best" or which.isdigit():
        folder = config.checkpoints_dir / ("best" if which == "best" else f"checkpoint-{int(which)}")
    else:
        folder = Path(which)
    if not (folder / CONFIG_FILE).is_file():
        kept = ", ".join(str(checkpoint.step) for checkpoint in checkpoints.committed(config.checkpoints_dir))
        raise ConfigError(
            f"--checkpoint {which}: there is no adapter in {folder}; checkpoints of the run: {kept or 'none'}"
        )
    return folder


def _last(config: RunConfig) -> Path:
    """The final adapter, unless the run went on after it."""
    run_dir, newest = Path(config.run_dir), checkpoints.latest(config.checkpoints_dir)
    final, summary = run_dir / "adapter", run_dir / "trainer.json"
    if (final / CONFIG_FILE).is_file() and summary.is_file():
        ended = json.loads(summary.read_text(encoding="utf-8"))
        if newest is None or (ended["finished"] and int(ended["steps"]) >= newest.step):
            return final
    if newest is None:
        raise ConfigError(f"run_dir: {run_dir} has no adapter yet: neither a checkpoint nor the final one")
    return newest.folder
