"""GPUs as NVML sees them, which needs no CUDA context of this process and so no memory of the GPU.

Guarantee: of the GPUs that whoever started this process gave it in CUDA_VISIBLE_DEVICES, no other is ever named.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import DeviceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # that of nvidia-smi
GIVEN = os.environ.get(VISIBLE)
"""What this process was started with; `select_gpus` narrows the variable."""
_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class VisibleGpu:
    """`index` is as nvidia-smi counts, `name` what CUDA_VISIBLE_DEVICES calls it: the index, or an instance of MIG."""

    index: int
    name: str


@dataclass(frozen=True)
class Gpu:
    """`index` is as nvidia-smi counts."""

    index: int
    uuid: str
    total_bytes: int
    free_bytes: int
    is_divided: bool = False  # by MIG; the numbers are those of the whole

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


def gpu_facts(index: int) -> Gpu | None:
    """None where NVML does not answer, or has no such GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()  # counts its calls; the first one does the work
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory, uuid = pynvml.nvmlDeviceGetMemoryInfo(handle), _text(pynvml.nvmlDeviceGetUUID(handle))
        return Gpu(index, uuid, memory.total, memory.free, _is_divided(pynvml, handle))
    except Exception:  # a driver that does not answer must not cost more than what it would have said
        return None


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # a GPU that cannot be
        return False


def visible_gpus(named: str | None) -> list[VisibleGpu]:
    """GPUs that a process with this CUDA_VISIBLE_DEVICES may use, in its order; None: all of the machine. As for CUDA, an entry
    that is no GPU hides those behind it. Raises DeviceError where the driver does not answer."""
    try:
        import pynvml
    except ImportError as error:
        if _DRIVER.exists():
            raise DeviceError(
                "this machine has an NVIDIA driver, and nvidia-ml-py is not installed, which asks it for its GPUs: "
                "pip install nvidia-ml-py; or use --gpu cpu"
            ) from error
        return []
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        if named is None:
            return [VisibleGpu(index, str(index)) for index in range(count)]
        return _named(pynvml, named.split(","), count)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        raise DeviceError(f"the NVIDIA driver does not answer: {error}. Is it in order? Or use --gpu cpu") from error


def given_gpu(number: int) -> VisibleGpu:
    """The GPU of this number among those that this process was started with. Raises DeviceError if there is none."""
    if GIVEN is None:
        return VisibleGpu(number, str(number))
    there = visible_gpus(GIVEN)
    if number >= len(there):
        raise DeviceError(f"there is no GPU {number} in {VISIBLE}={GIVEN}, which this process was started with")
    return there[number]


def environment_of(number: int | None) -> dict[str, str]:
    """The variables of a child process that uses the GPU of this number among the given ones; None: none, also not those of its
    parent, which has them filled. Raises DeviceError if there is no such GPU."""
    return ORDER | {VISIBLE: "" if number is None else given_gpu(number).name}


def _named(nvml: Any, entries: list[str], count: int) -> list[VisibleGpu]:
    found: list[VisibleGpu] = []
    for entry in map(str.strip, entries):
        gpu = _find(nvml, entry, count)
        if gpu is None:
            break
        found.append(gpu)
    return found


def _find(nvml: Any, entry: str, count: int) -> VisibleGpu | None:
    if entry.isdecimal():
        return VisibleGpu(int(entry), entry) if int(entry) < count else None
    if entry.startswith("MIG-"):
        try:
            parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(entry))
            return VisibleGpu(int(nvml.nvmlDeviceGetIndex(parent)), entry)
        except nvml.NVMLError:
            return None
    if not entry.startswith("GPU-"):
        return None
    uuids = [_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)]
    [*indexes] = (index for index, uuid in enumerate(uuids) if uuid.startswith(entry))  # CUDA takes the begin of a name
    return VisibleGpu(indexes[0], str(indexes[0])) if len(indexes) == 1 else None


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
