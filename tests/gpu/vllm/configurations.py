"""The engine configurations that vLLM makes of ours on CUDA, as JSON: `python -m tests.gpu.vllm.configurations MODEL_FOLDER`.

Guarantee: `producer.engine.configuration.build_vllm_config` and everything of vLLM below it are real. With `--write` the table
that the test compares with is written anew.
"""

import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.vllm import cuda_platform

TABLE = Path(__file__).with_name("configurations.json")

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "adapter": (1, "bfloat16", {}),
    "adapter, float16": (1, "float16", {}),
    "adapter, rank 12": (1, "bfloat16", {"lora": {"r": 12, "lora_alpha": 8}}),
    "adapter, float32": (1, "float32", {}),
    "merged": (1, "bfloat16", {"swap": {"mode": "merged"}}),
    "merged, float32": (1, "float32", {"swap": {"mode": "merged"}}),
    "full": (1, "bfloat16", {"lora": None}),
    "turns, adapter": (1, "bfloat16", {"pipeline": {"gpu": "turns"}}),
    "turns, merged": (1, "bfloat16", {"pipeline": {"gpu": "turns"}, "swap": {"mode": "merged"}}),
    "quantized, fp8": (1, "bfloat16", {"engine": {"quantization": "fp8"}, "swap": {"probe_tolerance": 1.0}}),
    "quantized, bitsandbytes": (
        1,
        "bfloat16",
        {"engine": {"quantization": "bitsandbytes"}, "swap": {"probe_tolerance": 1.0}},
    ),
    "KV cache in fp8": (1, "bfloat16", {"engine": {"kv_cache_dtype": "fp8"}, "swap": {"probe_tolerance": 1.0}}),
    "ngram": (1, "bfloat16", {"engine": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}}),
    "eager": (1, "bfloat16", {"engine": {"enforce_eager": True}}),
    "tokens of the user": (1, "bfloat16", {"engine": {"max_num_batched_tokens": 4096}}),
    "graphs of the user": (
        1,
        "bfloat16",
        {"engine": {"compilation_config": {"max_cudagraph_capture_size": 256}, "cudagraph_metrics": False}},
    ),
    "adapter, 2 GPUs": (2, "bfloat16", {}),
    "merged, 2 GPUs": (2, "bfloat16", {"swap": {"mode": "merged"}}),
    "2 groups of layers": (2, "bfloat16", {"engine": {"pipeline_parallel_size": 2}}),
}
"""GPUs of `--gpu`, `model.dtype`, and what else the run's file says."""
PARAMETERS = {"0.1 B": 134_515_008, "0.6 B": 596_049_920, "1.5 B": 1_543_714_304, "8 B": 8_190_735_360}
"""Models as large as these, with one layer."""


def main() -> None:
    folder = Path(sys.argv[1])
    cuda_platform.install()
    table = {model: _in_a_fork(_table_of, model, folder) for model in cuda_platform.MODELS}
    if "--write" in sys.argv:
        TABLE.write_text(written(table))
    print(json.dumps(table))


Table = dict[str, dict[str, dict[str, Any]]]


def written(table: Table) -> str:
    """One case a line: of a GPU's first the whole, of the others what differs from it."""
    parts = []
    for model, rows in table.items():
        first = next(iter(rows.values()))
        lines = []
        for name, row in rows.items():
            shown = row if row is first or "refused" in row else {k: v for k, v in row.items() if v != first[k]}
            lines.append(f"    {json.dumps(name)}: {json.dumps(shown)}")
        parts.append(f"  {json.dumps(model)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table() -> Table:
    """The table as it is checked in."""
    read: Table = json.loads(TABLE.read_text())
    for rows in read.values():
        first = next(iter(rows.values()))
        for name, row in rows.items():
            rows[name] = row if "refused" in row else first | row
    return read


def _in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """vLLM keeps answers about the GPU for as long as a process lives."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def _table_of(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    cuda_platform.present.model = cuda_platform.MODELS[model]
    rows = {name: _row(folder, *case) for name, case in CASES.items()}
    for name, number in PARAMETERS.items():
        with tempfile.TemporaryDirectory() as large:
            rows[name] = _row(_enlarged(folder, Path(large), number), *CASES["adapter"])
    return rows


def _enlarged(folder: Path, copy: Path, number: int) -> Path:
    """Copy a model, but for its weights, and let its file of weights say that it has so many, in a hole of the disk."""
    shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [number], "data_offsets": [0, 2 * number]}}
    start = json.dumps(header).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(start).to_bytes(8, "little") + start)
        file.truncate(8 + len(start) + 2 * number)
    return copy


def _row(folder: Path, num_gpus: int, dtype: str, sections: dict[str, Any]) -> dict[str, Any]:
    from producer.engine.configuration import build_vllm_config
    from protocol.errors import ConfigError
    from tests.unit.consumer.builders import run_config

    cuda_platform.present.count = num_gpus
    with tempfile.TemporaryDirectory() as run_dir:
        config = run_config(Path(run_dir), folder, dtype, **sections)
    try:
        return facts_of(build_vllm_config(config, folder, num_gpus))
    except ConfigError as error:
        return {"refused": str(error).partition(":")[0]}


def facts_of(config: Any) -> dict[str, Any]:
    """What of a VllmConfig decides which engine it is."""
    parallel, scheduler, model, lora = (
        config.parallel_config,
        config.scheduler_config,
        config.model_config,
        config.lora_config,
    )
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": scheduler.async_scheduling,
        "executor": str(parallel.distributed_executor_backend),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "worker_extension": parallel.worker_extension_cls,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "graph_sizes": config.compilation_config.cudagraph_capture_sizes,
        "graph_metrics": config.observability_config.cudagraph_metrics,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "logprobs_mode": str(model.logprobs_mode),
        "sleep": model.enable_sleep_mode,
        "lora": {"slots": lora.max_loras, "on_the_host": lora.max_cpu_loras, "rank": lora.max_lora_rank}
        if lora
        else None,
    }


if __name__ == "__main__":
    main()
