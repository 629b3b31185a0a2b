"""What the clients of a server need on their hosts, by the keys of `engine_server` in the configuration.

Guarantee: paths are absolute, because whoever starts a producer does so in another folder.
"""

import os
from pathlib import Path

from protocol.config.run import RunConfig

ADAPTER_DIR = "adapter_dir"
_KEYS = (ADAPTER_DIR, "key_file", "ca_file")


def server_files(config: RunConfig) -> dict[str, Path]:
    """Those that are given; none without `engine_server`. Relative names begin in the working directory."""
    given = {key: getattr(config.engine_server, key, None) for key in _KEYS}
    return {key: Path(os.path.abspath(os.path.expanduser(value))) for key, value in given.items() if value is not None}
