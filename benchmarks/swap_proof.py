"""What the proof by bits costs at a swap: `python -m benchmarks.swap_proof`, or `make bench-swap-proof`.

Guarantee: one real vLLM engine loads the same adapter again and again, without other requests, with the proof and without it in
turns: verified, unpacked, loaded. CPU time is the mean, of all processes; it hardly depends on what else runs. The switch is of
this benchmark alone.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.swap import RANKS, _build_model, _config
from producer.engine import merged_worker
from producer.engine.adapter_worker import AdapterWorker
from producer.engine.merged_worker import MergeWorker
from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter
from protocol.wire.adapter_blob import CONFIG, TENSORS, AdapterBlob, pack, unpack

EVIDENCE, ROW_SUMS = merged_worker.evidence_of, merged_worker.row_sums


class SwitchedLoading(AdapterWorker):
    def prove_by_bits(self, on: bool) -> None:
        loading: Any = self._loading

        def read(request: Any, checksum: int | None) -> None:
            loading._ready = {request.lora_int_id: (loading._load(request), None)}

        def done(request: Any, published: None) -> None:
            loading.state = ("done", request.lora_path)

        if on:
            loading.__dict__.pop("_read", None), loading.__dict__.pop("_begin_proof", None)
        else:
            loading._read, loading._begin_proof = read, done


class SwitchedMerging(MergeWorker):
    def prove_by_bits(self, on: bool) -> None:
        merging: Any = self._merging

        def done() -> None:
            merging.state = ("done", merging._path)

        module: Any = merged_worker
        module.evidence_of = EVIDENCE if on else lambda *_: None
        module.row_sums = ROW_SUMS if on else lambda weight: 0
        if on:
            merging.__dict__.pop("prove", None)
        else:
            merging.prove = done


def build_adapter(model: Path, folder: Path, rank: int) -> tuple[bytes, str]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    lora = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    lora.save_pretrained(folder)
    return pack(AdapterBlob((folder / CONFIG).read_bytes(), (folder / TENSORS).read_bytes()))


async def measure(folder: Path, size: int, mode: str, repeat: int) -> list[dict[str, Any]]:
    """Return seconds of each load from the last byte on, of them those of the engine, and CPU seconds of both, by whether it was
    proved. The first of each warms up."""
    from producer.engine.engine import VllmEngine

    model, adapter = _build_model(folder / "model"), folder / "adapter"
    blob, digest = build_adapter(model, adapter, RANKS[size])
    workers = {"adapter": SwitchedLoading, "merged": SwitchedMerging}[mode].__name__
    extension = {"worker_extension_cls": f"benchmarks.swap_proof.{workers}"}
    before = set(psutil.Process().children(recursive=True))
    with patch("producer.engine.configuration.own_arguments", lambda *given: own_arguments(*given) | extension):
        engine = VllmEngine(_config(model, folder, RANKS[size], mode, "cpu"), 0)
    found = []
    try:
        await engine.warm_up()
        processes = {psutil.Process(), *psutil.Process().children(recursive=True)} - before
        for number in range(1, 2 * repeat + 3):
            proved = bool((number + number // 2) % 2)
            await engine._core.call_workers("prove_by_bits", proved)
            path = folder / f"v{number}"
            started, cpu = time.perf_counter(), _cpu_s(processes)
            checksum = await asyncio.to_thread(unpack, blob, digest, path)
            unpacked = time.perf_counter()
            version = Adapter(number, f"v{number}", number, path, checksum)
            await engine.weights.load(version)
            ended = time.perf_counter()
            taken = {"wall_s": ended - started, "engine_s": ended - unpacked, "cpu_s": _cpu_s(processes) - cpu}
            if number > 2:
                found.append({"mb": size, "mode": mode, "proved": proved, **taken})
            engine.weights.activate(version)
            await engine.weights.discard(version)
            shutil.rmtree(path)
    finally:
        engine.shutdown()
        await asyncio.sleep(0.1)
    return found


def _cpu_s(processes: set[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def show(loads: list[dict[str, Any]]) -> None:
    for mode in ("adapter", "merged"):
        for size in sorted({one["mb"] for one in loads}):
            rows = [one for one in loads if (one["mb"], one["mode"]) == (size, mode)]
            if not rows:
                continue
            parts = []
            for unit in ("wall_s", "engine_s", "cpu_s"):
                typical = statistics.mean if unit == "cpu_s" else statistics.median
                on, off = (typical(one[unit] for one in rows if one["proved"] is proved) for proved in (True, False))
                parts.append(
                    f"{unit[:-2]} {1000 * off:.0f} ms, with the proof {1000 * on:.0f} ms ({on / max(off, 1e-9):.2f})"
                )
            print(f"{size:>4} MB {mode:8} {'; '.join(parts)}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/swap_proof.json"), help="JSON file to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 160], choices=list(RANKS), help="MB")
    parser.add_argument("--modes", nargs="+", default=["adapter", "merged"], choices=("adapter", "merged"))
    parser.add_argument("--repeat", type=int, default=10, help="loads of each (default: %(default)s)")
    arguments = parser.parse_args(argv)
    loads: list[dict[str, Any]] = []
    for mode in arguments.modes:
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory(prefix="bench-swap-proof-") as scratch:
                loads += asyncio.run(measure(Path(scratch), size, mode, arguments.repeat))
            show(loads)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(loads, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
