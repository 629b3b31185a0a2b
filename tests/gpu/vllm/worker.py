"""A plugin of pytest (`-p tests.gpu.vllm.worker`): vLLM's own GPU worker on the stand-in GPU, its Triton kernels interpreted."""

import importlib
import os
from typing import Any

import torch

from tests.gpu.stand_in import cuda, interpreter
from tests.gpu.vllm import cuda_platform

ENGINE = {
    "enforce_eager": True,
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,  # the start computes that many
    "gpu_memory_utilization": 0.01,
    "num_gpu_blocks_override": 16,
    "attention_backend": "TRITON_ATTN",  # the only one without compiled kernels
    "compilation_config": {"custom_ops": ["none"]},
}
"""What `engine:` says so that nothing is asked of kernels that only a build for CUDA has."""


def install() -> None:
    os.environ |= {
        "TRITON_INTERPRET": "1",  # before anything imports Triton
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # as vLLM does where CUDA has not begun; a new process would have no GPU
    }
    importlib.import_module("bitsandbytes")  # it would look for its library for CUDA once there is a GPU
    cuda.install()
    cuda_platform.install()
    torch.ops._C.get_cuda_view_from_cpu_tensor = torch.ops.stand_in.view_of_pinned
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    worker.kernel_warmup = lambda *_, **__: None  # it compiles what is not used, and imports torchvision
    interpreter.install()
    shrink: Any = importlib.import_module("vllm.lora.ops.triton_ops.lora_shrink_op")
    chosen = shrink.get_lora_op_configs  # it would have 64 programs share a sum of 64 products
    shrink.get_lora_op_configs = lambda *shape, **named: chosen(*shape, **named) | {"split_k": 2}


install()
