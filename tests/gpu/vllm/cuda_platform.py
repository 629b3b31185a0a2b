"""vLLM's CUDA platform without CUDA: its Python is vLLM's own, what its compiled extensions would answer is stood in for.

Guarantee: `install` comes before anything else of vLLM is imported; a process keeps its platform. `present` says which GPU the
platform finds, at every question.
"""

import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Model:
    """A model of NVIDIA's, as the driver tells of it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


MODELS = {
    "h100": Model("NVIDIA H100 80GB HBM3", (9, 0), 85520809984),
    "h200": Model("NVIDIA H200", (9, 0), 150754820096),
    "a100": Model("NVIDIA A100-SXM4-80GB", (8, 0), 85174583296),
    "l4": Model("NVIDIA L4", (8, 9), 24152899584),
}
present = SimpleNamespace(model=MODELS["h100"], count=1)

_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
_SMALLEST_CAPABILITIES = {
    "cutlass_scaled_mm_supports_fp8": (8, 9),
    "cutlass_scaled_mm_supports_block_fp8": (9, 0),
    "cutlass_scaled_mm_supports_fp4": (10, 0),
    "cutlass_group_gemm_supported": (9, 0),
}
"""What vLLM asks its kernels before it chooses among them, and from which GPUs on they say yes."""


def install() -> None:
    """Make vLLM's platform the CUDA one, with the GPUs that are `present`."""
    for name in _EXTENSIONS:
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["vllm.cumem_allocator"]).update(
        init_module=None, python_create_and_map=None, python_unmap_and_release=None
    )
    for question, smallest in _SMALLEST_CAPABILITIES.items():
        setattr(torch.ops._C, question, lambda *_, smallest=smallest: present.model.capability >= smallest)
    interpret_triton("nvidia")
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()  # those of this CPU, by the names that both builds have
    platforms: Any = vllm.platforms
    platforms.vllm_version_matches_substr = lambda part: False  # of the build for CPUs, it asks
    platforms._current_platform = _platform()()
    import vllm.distributed.device_communicators.cuda_wrapper as wrapper
    import vllm.platforms.cuda as cuda

    cuda._cuda_device_count_stateless = lambda visible=None: present.count
    wrapper.find_loaded_library = lambda name: "libcudart.so"  # sleep mode is not available without it
    torch.accelerator.device_count = lambda: present.count


def _platform() -> type:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class StandInPlatform(CudaPlatformBase):
        """vLLM's own platform, with a driver that knows the `present` GPUs."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*present.model.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return present.model.name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return present.model.total_bytes

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def device_count(cls) -> int:
            return present.count

    return StandInPlatform


def interpret_triton(backend: str) -> None:
    """Let vLLM find Triton usable. With TRITON_INTERPRET=1, which is set before, its kernels run in Triton's interpreter."""
    from triton.backends import backends

    active = SimpleNamespace(is_active=staticmethod(lambda: True))
    if backend in backends:
        backends[backend].driver.is_active = active.is_active
    else:
        backends[backend] = SimpleNamespace(driver=active, compiler=None)
    assert os.environ.get("TRITON_INTERPRET") == "1" or backend == "nvidia"


def use_model_runner_v2() -> None:
    """Give the CPU platform, where Triton has no backend, the model runner that vLLM takes on CUDA."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    interpret_triton("cpu")
