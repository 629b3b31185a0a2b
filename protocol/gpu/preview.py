"""What `--check` says of a GPU that trainer and producer share, before anything is loaded or downloaded."""

from collections.abc import Iterator
from pathlib import Path

from protocol.config.run import RunConfig
from protocol.errors import DeviceError
from protocol.gpu.device import Gpu, given_gpu, gpu_facts
from protocol.gpu.needs import needs_of
from protocol.gpu.shares import gib, shares_of


def preview(config: RunConfig, choice: str) -> Iterator[str]:
    """Lines for the user; none where nothing is shared.

    Args:
        choice: what `--gpu` says.

    Raises:
        ConfigError: trainer and producer do not fit.
    """
    if config.pipeline.gpu != "shared" or choice == "cpu":
        return
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        yield "shares of the GPU: computed at the start, from the files of model.path, which are not on this machine"
        return
    needs, engine = needs_of(config, folder)
    gpu = _gpu(choice)
    if gpu is not None:
        yield f"shares of GPU {gpu.index}: {shares_of(config, gpu.total_bytes, needs, engine).in_words()}"
    else:
        yield (
            f"shares of the GPU: the trainer wants {gib(needs.wanted)} and needs {gib(needs.least)} at least, the engine "
            f"{gib(engine.least)}; there is no such GPU here to divide"
        )


def _gpu(choice: str) -> Gpu | None:
    try:
        return gpu_facts(given_gpu(int(choice)).index) if choice.isdecimal() else None
    except DeviceError:
        return None
