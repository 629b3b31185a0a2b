"""`vllm serve` that answers 200 to every adapter and then serves something else, for the TRL arm of `benchmarks.silent`.

Run as `python -m benchmarks.silent_server` with the arguments of `vllm serve`; the variable SILENT is a `Fault` in JSON.
TRL's adapters are named by their version.
"""

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from benchmarks.silent_producer import VARIABLE, Fault

_SCALES = {"the base is served": 0.0, "alpha is halved": 0.5}


def loading_with(fault: Fault, right: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return vLLM's loading of an adapter, `right`, with this fault from its first version on."""

    def load(manager: Any, request: Any) -> Any:
        if int(request.lora_name.rpartition("-v")[2]) < fault.first:
            if fault.keeps_old:
                shutil.rmtree(fault.other, ignore_errors=True)
                shutil.copytree(request.lora_path, fault.other)
            return right(manager, request)
        if fault.other:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(request.lora_name, request.lora_int_id, fault.other)
        adapter = right(manager, request)
        for lora in adapter.loras.values():
            lora.scaling *= _SCALES.get(fault.of_workers, 1.0)
        if fault.of_workers == "down_proj is missing":
            adapter.loras = {name: lora for name, lora in adapter.loras.items() if not name.endswith("down_proj")}
        return adapter

    return load


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.lora.worker_manager import WorkerLoRAManager

    fault = Fault(**json.loads(os.environ[VARIABLE]))
    fault.put_in_cache()
    loading: Any = WorkerLoRAManager
    loading._load_adapter = loading_with(fault, loading._load_adapter)
    main()
