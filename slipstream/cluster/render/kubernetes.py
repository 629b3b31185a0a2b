"""A run as manifests of Kubernetes.

Guarantee: pure. No manifest holds a key. Pods come back unless a new start cannot cure what ended them, and one that the cluster
stopped has not finished.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from protocol import __version__
from protocol.errors import ConfigError
from slipstream.cluster.render.deployment import Deployment
from slipstream.cluster.render.templates import fill

TEMPLATES = ("apply.sh", "trainer.yaml", "producers.yaml", "monitoring.yaml")
STATE = "/var/lib/slipstream"  # in the trainer's pod: its volume
_TRAINER_METRICS, _PRODUCER_METRICS = 9464, 9465
_MOST_BYTES = 900_000  # of a ConfigMap, which may have 1 MiB


class RunFile(NamedTuple):
    """`name` is relative to the folder of the run."""

    key: str  # in the ConfigMap
    name: str
    text: str


def render(deployment: Deployment, run_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The content of each file, by its name.

    Args:
        run_files: configuration and own Python files of the run, by names relative to its folder, the configuration first.

    Raises:
        ConfigError: the files of the run do not go into a ConfigMap.
    """
    size = deployment.size
    overrides = deployment.trainer_overrides("/run/slipstream/keys", everywhere=True)
    overrides += [
        f"run_dir={STATE}/run",
        "observability.metrics_host=0.0.0.0",
        f"observability.trainer_metrics_port={_TRAINER_METRICS}",
        f"observability.producer_metrics_port={_PRODUCER_METRICS}",
    ]
    secrets = {key: Path("/run/credentials", key) for key in deployment.server_secrets}
    values = {
        "name": deployment.name,
        "size": size,
        "num_producers": size.num_producers,
        "programs": deployment.programs,
        "port": deployment.port,
        "trainer_metrics": _TRAINER_METRICS,
        "producer_metrics": _PRODUCER_METRICS,
        "trainer_gpus": _gpus(size.num_ranks if size.on_gpus else 0),
        "producer_gpus": _gpus(size.num_gpus),
        "image": f"slipstream:{__version__}",
        "state": STATE,
        "adapter_dir": deployment.adapter_dir,
        "server_secrets": deployment.server_secrets,
        "server_files": deployment.server_files | secrets,
        "files": _in_config_map(run_files),
        "config_name": next(iter(run_files)),
        "overrides": overrides,
        "notes": _notes(deployment),
        "model": deployment.model_folder,
    }
    return {"keys.sh": fill("keys.sh", **values)} | {name: fill(f"kubernetes/{name}", **values) for name in TEMPLATES}


def _gpus(count: int) -> str:
    """As `--gpu` takes them: a pod sees its own alone."""
    return ",".join(map(str, range(count))) or "cpu"


def _in_config_map(files: Mapping[str, bytes]) -> list[RunFile]:
    if sum(map(len, files.values())) > _MOST_BYTES:
        raise ConfigError(
            f"the run's own files have more than {_MOST_BYTES} bytes, which no ConfigMap holds; put them into the image"
        )
    found = []
    for number, (name, content) in enumerate(files.items()):
        try:
            found.append(RunFile(f"{number}-{re.sub('[^A-Za-z0-9._-]', '_', Path(name).name)}", name, content.decode()))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: it is not text in UTF-8; put it into the image") from error
    return found


def _notes(deployment: Deployment) -> list[str]:
    """What of the configuration is on this machine and must be in the image or on the volume."""
    datasets = deployment.config.dataset.all_sources.items()
    places = {f"{key}.path": deployment.folder / source.path for key, source in datasets if source.path}
    found = {key: place for key, place in places.items() if place.exists()}
    if deployment.model_folder:
        found["model.path"] = deployment.model_folder
    return [
        f"{key} is {place} of this machine: put that into the image, or on a volume." for key, place in found.items()
    ]
