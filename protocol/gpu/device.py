"""A GPU as NVML sees it, which needs no CUDA context of this process and so no memory of the GPU."""

from dataclasses import dataclass
from typing import Any


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
        memory, uuid = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetUUID(handle)
        name = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
        return Gpu(index, name, memory.total, memory.free, _is_divided(pynvml, handle))
    except Exception:  # a driver that does not answer must not cost more than what it would have said
        return None


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # a GPU that cannot be
        return False
