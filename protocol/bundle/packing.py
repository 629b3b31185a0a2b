"""From a run's configuration and folder to the bundle of its producers.

Guarantee: equal configuration, files and packages give equal bytes. `BundleError` says why there is no bundle.
"""

from pathlib import Path

import yaml

from protocol.bundle.bundle import CONFIG_FILE, Bundle, BundledFile, encode
from protocol.bundle.requirements import requirements
from protocol.bundle.shared_config import SharedConfig, share
from protocol.bundle.sources import RunSources
from protocol.config.run import RunConfig
from protocol.config.sections.environment import VerifiersSection


def pack(config: RunConfig, folder: Path) -> bytes:
    """The bundle, encoded.

    Args:
        folder: where the trainer was started, and names of files and modules begin.
    """
    sources = RunSources(folder.resolve())
    shared = gather(config, sources)
    text = yaml.dump(shared.values, Dumper=yaml.CSafeDumper, sort_keys=True, allow_unicode=True)
    files = [BundledFile(CONFIG_FILE, text.encode())]
    files += [BundledFile(name, content) for name, content in sources.files.items()]
    return encode(Bundle(files, requirements(sources.installed), shared.host_keys))


def gather(config: RunConfig, sources: RunSources) -> SharedConfig:
    """Adds the files that producers need to `sources`. Raises BundleError as `pack` does."""
    shared = share(config, sources)
    if config.environment.verifiers is not None:
        _add_taskset(config.environment.verifiers, sources)
    return shared


def _add_taskset(section: VerifiersSection, sources: RunSources) -> None:
    """Where it is a module of the folder. What it imports is for the Python that plays it."""
    ours = dict(sources.installed)
    sources.add_module(section.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
    if section.python is not None:
        sources.installed = ours
