"""torch.cuda on the stand-in GPU.

Guarantee: stood in for are the functions that a build with CUDA has in C (`torch._C._cuda_*`), with the errors they raise for
wrong arguments; the Python of torch.cuda and torch.accelerator is torch's own. bitsandbytes has to be imported before: then
it loads its library for CPUs.
"""

import ctypes
import functools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.stand_in.building import gpu_library

TOTAL_BYTES = 85520809984  # of an H100 80GB HBM3
_DEVICE = torch.device("cuda", 0)
_VERSION = (13, 0)
_CAPABILITY = (9, 0)


class Gpu:
    """The stand-in GPU of this process."""

    def __init__(self, library: ctypes.CDLL, total_bytes: int) -> None:
        for name in ("allocated", "peak", "refusals", "syncs"):
            getattr(library, f"stand_in_{name}").restype = ctypes.c_int64
        library.stand_in_limit.argtypes = [ctypes.c_int64]
        library.stand_in_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library = library
        self._reserved = 0
        self._fraction = 1.0
        self.calls: list[str] = []  # of torch._C._cuda_*, in their order
        self.total_bytes = total_bytes

    @property
    def total_bytes(self) -> int:
        return self._total

    @total_bytes.setter
    def total_bytes(self, total: int) -> None:
        self._total = total
        self._library.stand_in_limit(int(self._fraction * total))

    @property
    def allocated_bytes(self) -> int:
        return int(self._library.stand_in_allocated())

    @property
    def num_syncs(self) -> int:
        """How often the host has waited for a result of the GPU."""
        return int(self._library.stand_in_syncs())

    @property
    def fraction(self) -> float:
        """Of its memory that torch may take."""
        return self._fraction

    @fraction.setter
    def fraction(self, share: float) -> None:
        self._fraction = share
        self._library.stand_in_limit(int(share * self._total))

    def memory_info(self) -> tuple[int, int]:
        return self._total - self._noted_reserved(), self._total

    def memory_stats(self) -> dict[str, Any]:
        allocated, peak, reserved = self.allocated_bytes, int(self._library.stand_in_peak()), self._noted_reserved()

        def entry(current: int, peak: int) -> dict[str, Any]:
            return {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}

        return {
            "allocated_bytes": entry(allocated, peak),
            "active_bytes": entry(allocated, peak),
            "reserved_bytes": entry(reserved, reserved),
            "num_ooms": int(self._library.stand_in_refusals()),
        }

    def empty_cache(self) -> None:
        self._reserved = self.allocated_bytes

    def reset_peak(self) -> None:
        self._noted_reserved()
        self._library.stand_in_reset_peak()

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        self._library.stand_in_resize(storage._cdata, size)

    def _noted_reserved(self) -> int:
        """A cache keeps what was in use at most, until it is emptied."""
        self._reserved = max(self._reserved, int(self._library.stand_in_peak()))
        return min(self._reserved, int(self._fraction * self._total))


class Event:
    """An event on a GPU on which everything has happened already."""

    device = _DEVICE
    _at: float | None = None

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self._at = time.monotonic()

    def wait(self, stream: Any = None) -> None:
        assert self._at is not None, "an event that was never recorded"

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._at is not None, "an event that was never recorded"

    def elapsed_time(self, later: "Event") -> float:
        assert self._at is not None
        assert later._at is not None
        return 1000 * (later._at - self._at)


class Stream:
    """The only stream there is."""

    device, device_index, device_type, stream_id, cuda_stream = _DEVICE, 0, 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *problem: object) -> None:
        pass


@functools.cache
def install() -> Gpu:
    """Gives this process the GPU, for good. Nothing of it may have asked torch.cuda for anything before."""
    gpu = Gpu(ctypes.CDLL(str(gpu_library())), TOTAL_BYTES)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    _stand_in_for_c(gpu)
    _stand_in_for_accelerator(gpu)
    _set_up_cuda(gpu)
    return gpu


def _index(device: object) -> int:
    """As CUDA's own functions in C take it: a number of a GPU that there is."""
    if not isinstance(device, int):
        raise TypeError(f"expected the number of a GPU, got {device!r}")
    if device != 0:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
    return device


def _stand_in_for_c(gpu: Gpu) -> None:
    def set_fraction(share: float, device: int) -> None:
        _index(device)
        gpu.fraction = share

    def of_gpu(answer: Callable[[], Any]) -> Callable[[int], Any]:
        def asked(device: int) -> Any:
            _index(device)
            return answer()

        return asked

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    functions: dict[str, Callable[..., Any]] = {
        "init": nothing,
        "isInBadFork": lambda: False,
        "getDeviceCount": lambda: 1,
        "getDevice": lambda: 0,
        "setDevice": of_gpu(nothing),
        "exchangeDevice": lambda device: 0,
        "maybeExchangeDevice": lambda device: 0,
        "hasPrimaryContext": of_gpu(lambda: True),
        "canDeviceAccessPeer": lambda one, other: True,
        "synchronize": nothing,
        "emptyCache": gpu.empty_cache,
        "memoryStats": of_gpu(gpu.memory_stats),
        "resetPeakMemoryStats": of_gpu(gpu.reset_peak),
        "resetAccumulatedMemoryStats": of_gpu(nothing),
        "setMemoryFraction": set_fraction,
        "getMemoryFraction": of_gpu(lambda: gpu.fraction),
        "getAllocatorBackend": lambda: "native",
        "cudaHostAllocator": lambda: 0,
        "isHistoryEnabled": lambda: False,
        "ipc_collect": nothing,
        "getCurrentStream": of_gpu(lambda: (0, 0, 1)),
        "getDefaultStream": of_gpu(lambda: (0, 0, 1)),
        "getCurrentRawStream": of_gpu(lambda: 0),
        "setStream": nothing,
        "isCurrentStreamCapturing": lambda: False,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": nothing,
        "getArchFlags": lambda: f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}",
        "getCompiledVersion": lambda: 1000 * _VERSION[0] + 10 * _VERSION[1],
    }

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            gpu.calls.append(name)
            return function(*arguments, **options)

        return call

    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", noted(name, function))


def _stand_in_for_accelerator(gpu: Gpu) -> None:
    c: Any = torch._C
    c._has_cuda = True
    c._accelerator_isAllocatorInitialized = lambda: True
    c._accelerator_emptyCache = gpu.empty_cache
    c._accelerator_emptyHostCache = lambda: None
    c._accelerator_getDeviceStats = lambda index: gpu.memory_stats()
    c._accelerator_resetPeakStats = lambda index: gpu.reset_peak()
    c._accelerator_resetAccumulatedStats = lambda index: None
    c._accelerator_getMemoryInfo = lambda index: gpu.memory_info()


def _set_up_cuda(gpu: Gpu) -> None:
    cuda: Any = torch.cuda
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=lambda device: gpu.memory_info(),
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
    )
    cuda._is_in_bad_fork = lambda: False
    cuda._is_compiled = lambda: True
    cuda._exchange_device = cuda._maybe_exchange_device = lambda device: 0
    cuda._get_device_properties = lambda device: _properties(gpu)
    cuda._check_capability = cuda._check_cubins = lambda: None
    cuda._queued_calls.clear()
    cuda.default_generators = (torch.default_generator,)
    cuda._cached_device_count = 1
    for module in (cuda, torch.cuda.streams):
        module.Event, module.Stream = Event, Stream
    torch.version.cuda = f"{_VERSION[0]}.{_VERSION[1]}"

    resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        gpu.resize(storage, size)
        return storage

    torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]


def _properties(gpu: Gpu) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=gpu.total_bytes,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )
