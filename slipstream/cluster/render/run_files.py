"""What a trainer on another machine needs of the run's folder: the configuration, and the Python files that it names.

Guarantee: only files below that folder, found without running them. A configuration that producers could not be given is refused
here already.
"""

from collections.abc import Iterator
from pathlib import Path

from protocol.bundle.packing import gather
from protocol.bundle.sources import RunSources
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from slipstream.cluster.render.deployment import Deployment


def run_files(deployment: Deployment) -> dict[str, bytes]:
    """Contents by names relative to the folder; the configuration is the first.

    Raises:
        SlipstreamError: a file is not there or lies elsewhere, or the configuration holds a secret.
    """
    sources = RunSources(deployment.folder.resolve())
    gather(deployment.config, sources)
    for key, function in _functions(deployment.config):
        if sources.add_function(function, key) != function:
            raise ConfigError(
                f"{key}: {function}: other machines have another folder; name the file relative to {deployment.folder}"
            )
    return {_name(deployment): _read(deployment.config_file)} | sources.files


def _functions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """By their keys in the file."""
    for number, reward in enumerate(config.rewards.functions):
        if reward.function:
            yield f"rewards.functions[{number}].function", reward.function
    if config.environment.factory:
        yield "environment.factory", config.environment.factory
    datasets = dict(config.dataset.all_sources)
    if config.evaluation is not None:
        datasets |= {f"evaluation.{key}": source for key, source in config.evaluation.dataset.all_sources.items()}
    for place, source in datasets.items():
        for key in ("filter", "transform"):
            if function := getattr(source, key):
                yield f"{place}.{key}", function


def _name(deployment: Deployment) -> str:
    file, folder = deployment.config_file, deployment.folder
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
