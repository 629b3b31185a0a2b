"""GPUs as NVML sees them, which needs no CUDA context of this process and so no memory of the GPU.

Guarantee: no GPU is ever named outside CUDA_VISIBLE_DEVICES as this process got it. Two processes on the same GPU name the same
id for it, from whatever container. A driver that does not answer is no error: then ids are of host and index, and memory is
unknown.
"""

import os
import socket
from collections.abc import Sequence
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
    """Return the facts of a GPU; None where NVML does not answer, or has no such GPU."""
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


def gpu_ids(gpus: Sequence[int]) -> list[str]:
    """Return the ids of the GPUs with these indexes, as nvidia-smi counts; without any, of this host's CPU."""
    host = socket.gethostname()[:64]
    if not gpus:
        return [f"cpu of {host}"]
    return [facts.uuid if (facts := gpu_facts(gpu)) else f"gpu {gpu} of {host}" for gpu in gpus]


def free_bytes(gpus: Sequence[int]) -> int | None:
    """Return the free bytes of the fullest of these GPUs; None without a GPU, or where the driver does not say."""
    found = [gpu_facts(gpu) for gpu in gpus]
    return min((facts.free_bytes for facts in found if facts is not None), default=None)


def users(gpus: Sequence[int]) -> dict[int, int]:
    """Return the bytes that processes use on these GPUs, by their ids, as far as the driver says: in a container it may not."""
    found: dict[int, int] = {}
    try:
        import pynvml

        for gpu in gpus:
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(gpu)):
                found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    except Exception:
        return found
    return found


_PIPES = "/tmp/nvidia-mps"  # noqa: S108  the default of the control daemon
_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def mps_in_words() -> str:
    """Return a sentence for the log on whether MPS runs."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _PIPES)
    if not _runs(folder):
        return f"CUDA MPS does not run ({folder}), so kernels of trainer and engine take turns on the GPU"
    share = os.environ.get(_THREADS)
    limit = f", with {_THREADS}={share} for this daemon" if share else ""
    return f"CUDA MPS runs ({folder}): kernels of trainer and engine work side by side{limit}"


def _runs(folder: Path) -> bool:
    """The control daemon removes the file when it ends, unless it is killed."""
    try:
        number = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        return number > 0 and Path(f"/proc/{number}").exists()
    except (OSError, ValueError, OverflowError):
        return False


def select_gpus(choice: str) -> list[int]:
    """Make exactly the chosen GPUs visible to this process, before any library looks at them, and returns their indexes as
    nvidia-smi counts, none for `cpu`. Where CUDA_VISIBLE_DEVICES is set, the choice is among those. What is no such GPU raises
    `DeviceError`."""
    if choice == "cpu":
        os.environ[VISIBLE] = ""
        return []
    chosen = choose_gpus(choice)
    os.environ |= ORDER | {VISIBLE: ",".join(gpu.name for gpu in chosen)}
    return [gpu.index for gpu in chosen]


def choose_gpus(choice: str, flag: str = "--gpu") -> list[VisibleGpu]:
    """Return the chosen GPUs, among those of CUDA_VISIBLE_DEVICES where that is set; `DeviceError` where one is no such GPU."""
    given = os.environ.get(VISIBLE)
    there = visible_gpus(given)
    chosen = [_chosen(f"{flag} {choice}", part, there, given) for part in choice.split(",")]
    if len(set(chosen)) != len(chosen):
        raise DeviceError(f"{flag} {choice}: the same GPU is named twice")
    if len(chosen) > 1 and any(gpu.name.startswith("MIG-") for gpu in chosen):
        raise DeviceError(f"{flag} {choice}: CUDA gives a process one instance of MIG; name one")
    return chosen


def _chosen(what: str, part: str, there: list[VisibleGpu], given: str | None) -> VisibleGpu:
    if part.startswith(("GPU-", "MIG-")):
        named = visible_gpus(part)
        if named and named[0] in there + (named if given is None else []):
            return named[0]
        raise DeviceError(f"{what}: there is no {part} {_place(given)}; `nvidia-smi -L` lists what there is")
    try:
        index = int(part)
    except ValueError:
        raise DeviceError(f"{what}: expected an index such as 0, a list such as 0,1, or cpu") from None
    if 0 <= index < len(there):
        return there[index]
    count = len(there)
    existing = f"GPUs 0 to {count - 1}" if count > 1 else "only GPU 0" if count else "no NVIDIA GPU"
    raise DeviceError(
        f"{what}: GPU {index} does not exist; there {'are' if count > 1 else 'is'} {existing} {_place(given)}. Name one "
        "that exists, or use --gpu cpu"
    )


def _place(given: str | None) -> str:
    return "on this machine" if given is None else f"in {VISIBLE}={given}"
