"""What a run on many machines makes of `pipeline.gpu`."""

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
