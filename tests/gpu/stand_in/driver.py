"""A driver's part of the stand-in GPU: NVML, which nvidia-ml-py loads, and the command nvidia-smi.

Guarantee: this process and its children see `NVML_GPUS` H100s (1), of each `NVML_USED_GIB` in use (0); both variables are read
at every question by NVML.
"""

import ctypes
import functools
import os
from pathlib import Path

from tests.gpu.stand_in.building import nvml_library

_NVIDIA_SMI = """#!/bin/sh
i=0
while [ $i -lt ${NVML_GPUS:-1} ]; do
  echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-00000000000$i)"
  i=$((i + 1))
done
"""


@functools.cache
def install() -> Path:
    """Returns the folder of the library and the command, which is first in both paths now."""
    library = nvml_library()
    folder = library.parent
    if not os.access(folder / "nvidia-smi", os.X_OK):
        fresh = folder / f".nvidia-smi-{os.getpid()}"
        fresh.write_text(_NVIDIA_SMI)
        fresh.chmod(0o755)
        fresh.rename(folder / "nvidia-smi")
    for variable in ("PATH", "LD_LIBRARY_PATH"):
        os.environ[variable] = os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))
    ctypes.CDLL(str(library))  # the linker of this process has read its path; it finds by name what is loaded
    return folder
