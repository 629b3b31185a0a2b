"""What `campaigns.chaos.zygote` imports and runs for `tests/gpu`: a process with the stand-in GPU. Its forks run
tests and commands.

Guarantee: TRL's Triton kernels run in Triton's interpreter; torch's flex_attention is computed without a compiler.
"""

import importlib
import os
from typing import Any

from tests.gpu import reports
from tests.gpu.stand_in import cuda, driver, interpreter
from tests.integration import warm

_USED = (
    "consumer.app.daemon",
    "consumer.learn.trainer",
    "consumer.link.device_moves",
    "hypothesis",
    "tests.gpu.trainers",
    "triton.experimental.gluon",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "trl.trainer.grpo_trainer",
    "peft.tuners.lora.bnb",
    "tests.integration.models",
)
"""What trainers and their tests import."""


def preload() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when TRL makes its kernels
    importlib.import_module("bitsandbytes")  # it would look for its library for CUDA once there is a GPU
    cuda.install()
    driver.install()
    interpreter.install()
    importlib.import_module("tests.gpu.stand_in.flex").install()
    for name in _USED:
        importlib.import_module(name)


def main(request: dict[str, Any]) -> int:
    if size := os.environ.get("STAND_IN_GPU_BYTES"):
        cuda.install().total_bytes = int(size)
    return reports.run(request) if "pytest" in request else warm.run(request)
