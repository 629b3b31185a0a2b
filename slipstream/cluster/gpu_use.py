"""The GPUs of a run on many machines: how many a producer takes, and what becomes of `pipeline.gpu`."""

from protocol.config.run import RunConfig
from protocol.errors import ConfigError


def check_gpu_use(config: RunConfig, num_gpus: int) -> None:
    """
    Args:
        num_gpus: of each producer; 0: everything computes on the CPU.

    Raises:
        ConfigError: trainer and producer are to be on one GPU, and whoever places daemons gives each GPUs of its own.
    """
    if num_gpus and config.pipeline.gpu != "own":
        raise ConfigError(
            f"pipeline.gpu: {config.pipeline.gpu} puts trainer and producer on one GPU, and rl-cluster gives each daemon GPUs of "
            "its own; set pipeline.gpu=own, or start the pair by hand (docs/one-gpu.md)"
        )


def producer_gpus(config: RunConfig, num_gpus: int) -> int:
    """Of each producer, where each is to have `num_gpus`: the clients of `engine_server` use none."""
    return 0 if config.engine_server is not None else num_gpus
