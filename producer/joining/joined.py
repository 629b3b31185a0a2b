"""From an address to the configuration of a producer: fetched, unpacked, applied.

Guarantee: while the context lasts, the working directory is a scratch folder with the run's files, so that names in the
configuration mean what they mean to the trainer; afterwards it is as before and the folder is gone. Overrides are of this host,
and relative paths in them begin where the command was given.
"""

import contextlib
import json
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from producer.joining.address import TrainerAddress, trainer_address
from producer.joining.fetching import BundleFetch, FetchedBundle
from protocol.bundle.bundle import CONFIG_FILE, Bundle, decode, differing, missing, unpack
from protocol.channel.keys import process_name
from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import BundleError, ConfigError
from protocol.runtime.scratch import scratch_folder

logger = logging.getLogger(__name__)

_PATHS = (
    "run_dir",
    "model.path",
    "serve.api_key_file",
    "environment.options.python",
    "engine_server.adapter_dir",
    "engine_server.key_file",
    "engine_server.ca_file",
)


@contextlib.contextmanager
def joined(arguments: Namespace, must_stop: Callable[[], bool]) -> Iterator[tuple[RunConfig, str]]:
    """The configuration, and the digest of the bundle that it is from. Raises SlipstreamError for whatever keeps this host from
    joining the run.

    Args:
        arguments: of which `connect`, `keys`, `model`, `wait` and `overrides` are read.
        must_stop: looked at while the trainer is waited for.
    """
    model = [] if arguments.model is None else [f"model.path={_quoted(_model_folder(arguments.model))}"]
    address = trainer_address(arguments.connect, arguments.keys, arguments.overrides)
    fetched = BundleFetch(process_name(address.keys), address, arguments.wait, must_stop).run()
    bundle = decode(fetched.data)
    overrides = [*model, *(_from_here(override, bundle) for override in arguments.overrides)]
    _check_host_keys(bundle, overrides)
    with scratch_folder() as scratch:
        files = scratch / "files"
        files.mkdir()
        unpack(bundle, files)
        with contextlib.chdir(files):
            ours = _of_this_host(address, fetched, scratch)
            config = load_config(CONFIG_FILE, [*ours, *overrides])
            if problems := missing(bundle.requirements):
                raise BundleError("\n  ".join(["this host lacks what the run's own files import:", *problems]))
            for difference in differing(bundle.requirements):
                logger.warning("%s", difference)
            logger.info("got bundle %s from the trainer: %d files", fetched.digest[:12], len(bundle.files))
            yield config, fetched.digest


def _of_this_host(address: TrainerAddress, fetched: FetchedBundle, scratch: Path) -> list[str]:
    values: dict[str, str | None] = {
        "run_dir": str(scratch / "run"),
        "transport.keys": address.keys_folder,
        "transport.endpoint": address.endpoint,
        "transport.blob_endpoint": fetched.blob_endpoint,
    }
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _model_folder(given: str) -> str:
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--model {given}: there is no such folder on this host")
    return str(folder)


def _from_here(override: str, bundle: Bundle) -> str:
    """With an absolute path, where the key has one and the value is there, or is to be made. A name of the hub stays one."""
    key, separator, value = override.partition("=")
    if key in (*_PATHS, *bundle.host_keys) and value and (key == "run_dir" or Path(value).exists()):
        return f"{key}{separator}{_quoted(os.path.abspath(value))}"
    return override


def _check_host_keys(bundle: Bundle, overrides: list[str]) -> None:
    given = {override.partition("=")[0] for override in overrides}
    absent = [key for key in bundle.host_keys if key not in given]
    if absent:
        raise ConfigError(
            "the trainer's configuration names places of its own host; give those of this host:\n  "
            + "\n  ".join("--model FOLDER" if key == "model.path" else f"--set {key}=..." for key in absent)
        )


def _quoted(value: str | None) -> str:
    """As the value of an override, which is YAML."""
    return json.dumps(value, ensure_ascii=False)
