"""The engines of the arms of `make gpu-check` as vLLM configures them on CUDA, as JSON: `python -m tests.gpu.vllm.arms FOLDER`.

FOLDER has a `model`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.plan import ARMS
from tests.gpu.vllm import cuda_platform


def main() -> None:
    folder = Path(sys.argv[1])
    cuda_platform.install()
    print(json.dumps({arm.name: _facts(folder, **arm.options) for arm in ARMS}))


def _facts(folder: Path, mode: str, engine: dict[str, Any], **_: Any) -> dict[str, Any]:
    from benchmarks.gpu_check.engine_arm import config_of
    from producer.engine.configuration import build_vllm_config

    config = config_of(folder, Place((0,), folder, folder), mode, engine)
    made = build_vllm_config(config, folder / "model", 1)
    return {
        "tokens": made.scheduler_config.max_num_batched_tokens,
        "largest_graph": made.compilation_config.max_cudagraph_capture_size,
        "specialized": bool(made.lora_config and made.lora_config.specialize_active_lora),
        "counts_graphs": made.observability_config.cudagraph_metrics,
    }


if __name__ == "__main__":
    main()
