"""The folder through which policies reach servers (`engine_server.adapter_dir`), on machines that may have it for themselves.

Guarantee: a folder that is not seen to be shared is refused with the fix. Where every producer has servers on its own host there
is nothing to share.
"""

from pathlib import Path
from urllib.parse import urlsplit

from protocol.config.operation import is_loopback
from protocol.errors import ConfigError
from slipstream.cluster.probe import is_on_network, mount_of
from slipstream.cluster.render.deployment import Deployment
from slipstream.cluster.server_files import ADAPTER_DIR

OF_A_POD = ("/dev", "/proc", "/run", "/sys", "/tmp")  # noqa: S108  names that are compared with
OF_A_UNIT = (*OF_A_POD, "/var/tmp", "/home", "/root", "/var/lib/slipstream")  # noqa: S108


def check_visible(deployment: Deployment, own: tuple[str, ...], who: str) -> None:
    """
    Args:
        own: folders that whoever runs a producer replaces or hides.
        who: has its own there, such as `a pod`.

    Raises:
        ConfigError: what the producer writes there would be seen by nobody else.
    """
    place = deployment.adapter_dir
    if place is None:
        return
    hidden = [top for top in own if place.is_relative_to(top)]
    if hidden or place == Path("/"):
        raise _refused(
            deployment,
            f"{who} has its own {hidden[0] if hidden else place} and shares nothing there with the server; name a folder "
            "elsewhere, such as /mnt/adapters, and its path for the server with engine_server.server_adapter_dir",
        )


def check_shared(deployment: Deployment, beside: Path | None = None) -> None:
    """As this machine sees the folder.

    Args:
        beside: a folder that every machine sees.

    Raises:
        ConfigError: it is on a disk of this machine.
    """
    place, server = deployment.adapter_dir, deployment.config.engine_server
    if place is None or server is None or all(is_loopback(urlsplit(url).netloc) for url in server.url):
        return
    mount, kind = mount_of(place)
    if is_on_network(kind) or (beside is not None and mount_of(beside) == (mount, kind)):
        return
    also = f", or one on the file system of {beside}, which all nodes see" if beside is not None else ""
    raise _refused(
        deployment,
        f"{place} is on a local disk of this machine ({kind}, mounted at {mount}), where a server of another one does not find "
        f"policies; name a folder of a network file system that this machine has mounted too{also}",
    )


def _refused(deployment: Deployment, why: str) -> ConfigError:
    server = deployment.config.engine_server
    given = server.adapter_dir if server else ""
    return ConfigError(f"{deployment.config_file}: engine_server.{ADAPTER_DIR}: {given}: {why}")
