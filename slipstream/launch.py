"""Both daemons of a run, as `slipstream run` and `slipstream.train` start them.

Guarantee: the commands are those that services run, as a user would start them by hand.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protocol.config.loader import load_config
from protocol.gpu.cards import sharing_of
from protocol.gpu.memory import known_gpu
from protocol.gpu.nvml import VISIBLE, visible_gpus
from protocol.runtime.supervisor import start_command
from slipstream.tables import duration, percent

if TYPE_CHECKING:
    from protocol.config.run import RunConfig
    from slipstream.status.reading import View

logger = logging.getLogger(__name__)


class Places(NamedTuple):
    """The GPUs of both sides, as `--gpu` takes them."""

    producer: str
    trainer: str

    @classmethod
    def of(cls, config: "RunConfig", count: int, producer: str | None = None, trainer: str | None = None) -> "Places":
        """Choose what is not named.

        Args:
            count: number of GPUs that this process may use.
        """
        numbers = [str(number) for number in range(count)]
        together = config.pipeline.gpu != "own"

        def beside(other: str | None) -> str:
            taken = (other or "").split(",")
            free = [number for number in numbers if together or number not in taken]
            return (other if together and other else None) or next(iter(free or numbers), "cpu")

        if config.engine_server:
            return cls(producer or "cpu", trainer or beside(None))
        first = producer or beside(trainer)
        return cls(first, trainer or beside(first))

    @classmethod
    def here(cls, config: "RunConfig", producer: str | None, trainer: str | None) -> "Places":
        """Choose among the GPUs of this machine."""
        on_cpu = producer == trainer == "cpu"
        return cls.of(config, 0 if on_cpu else len(visible_gpus(os.environ.get(VISIBLE))), producer, trainer)

    @property
    def are_shared(self) -> bool:
        return self.producer == self.trainer != "cpu"

    def sharing(self, config: "RunConfig") -> tuple[str, str] | None:
        """Return the value of `pipeline.gpu` that is chosen for a run on one GPU, and the reason; None where it is not chosen.
        Raises ConfigError if the run has no room there."""
        if not self.are_shared or config.pipeline.gpu != "own":
            return None
        gpu = known_gpu(self.trainer)
        return ("shared", "the GPU does not say its memory") if gpu is None else sharing_of(config, gpu.total_bytes)


class Launch(NamedTuple):
    """The command line of each daemon, and the folder of their run."""

    run_dir: Path
    trainer: list[str]
    producer: list[str]

    @classmethod
    def of(
        cls,
        config: str,
        overrides: Sequence[str] = (),
        *,
        producer_gpus: str | None = None,
        trainer_gpus: str | None = None,
        resume: bool = False,
    ) -> "Launch":
        """Plan the run of a file; `ConfigError` if the file is refused.

        Args:
            config: the run's YAML file.
            overrides: as `--set` takes them.
            producer_gpus: as `rl-producer --gpu` takes them (default: what this machine has).
            trainer_gpus: likewise.
            resume: go on from what the run's folder holds.
        """
        loaded = load_config(config, list(overrides))
        places = Places.here(loaded, producer_gpus, trainer_gpus)
        settings = ["--config", config, *(part for override in overrides for part in ("--set", override))]
        sharing = with_sharing(loaded, producer_gpus, trainer_gpus).pipeline.gpu
        if sharing != loaded.pipeline.gpu:
            settings += ["--set", f"pipeline.gpu={sharing}"]
        trainer = [*start_command("rl-trainer", [places.trainer]), *settings, *(["--resume"] if resume else [])]
        producer = [*start_command("rl-producer", [places.producer]), *settings]
        return cls(Path(loaded.run_dir), trainer, producer)


def with_sharing(config: "RunConfig", producer_gpus: str | None, trainer_gpus: str | None) -> "RunConfig":
    """Return the configuration with the value of `pipeline.gpu` that is chosen for this machine, and say why."""
    sharing = Places.here(config, producer_gpus, trainer_gpus).sharing(config)
    if sharing is None:
        return config
    logger.info("one GPU for both, with pipeline.gpu: %s: %s", *sharing)
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"gpu": sharing[0]})})


def progress(view: "View") -> str:
    """Describe in one line how far a run is."""
    trainer = view.trainer
    if trainer is None or trainer.step is None:
        return "starting: libraries, model and engine take a minute or so"
    parts = [
        f"step {trainer.step:,}" + (f" of {trainer.max_steps:,}" if trainer.max_steps else ""),
        "" if trainer.reward is None else f"reward {trainer.reward:.3f}",
        "" if trainer.tokens_generated_per_s is None else f"{trainer.tokens_generated_per_s:,.0f} tokens/s",
        "" if trainer.wait_share is None else f"trainer waits {percent(trainer.wait_share)}",
        f"about {duration(trainer.eta_s)} left" if trainer.eta_s else "",
    ]
    return " · ".join(part for part in parts if part)
