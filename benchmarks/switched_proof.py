"""vLLM workers of which benchmarks can switch off the proof by bits, to measure what it costs and what it sees.

Guarantee: everything else that a worker does at a swap stays. The product has no such switch.
"""

import time
from collections.abc import Callable
from typing import Any

from producer.engine import merged_worker
from producer.engine.adapter_worker import AdapterWorker
from producer.engine.merged_worker import MergeWorker
from producer.engine.patch_worker import Patcher, PatchWorker

_EVIDENCE, _ROW_SUMS = merged_worker.evidence_of, merged_worker.row_sums


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
        merging: Any = self._weights

        def done() -> None:
            merging.state = ("done", merging._path)

        module: Any = merged_worker
        module.evidence_of = _EVIDENCE if on else lambda *_: None
        module.row_sums = _ROW_SUMS if on else lambda weight: 0
        if on:
            merging.__dict__.pop("prove", None)
        else:
            merging.prove = done


class TimedPatching(PatchWorker):
    """A worker that has nothing switched off, and measures its threads."""

    def make_weights(self) -> Patcher:
        patcher: Any = super().make_weights()
        begin, self._cpu_s = patcher.begin, list[float]()

        def timed(work: Callable[[], None], done: str = "") -> None:
            def measured() -> None:
                before = time.thread_time()
                work()
                self._cpu_s.append(time.thread_time() - before)

            begin(measured, done)

        patcher.begin = timed
        return patcher

    def cpu_s_of_threads(self) -> list[float]:
        """Return the CPU seconds of each thread so far, those that prepare and those that prove in turns."""
        return self._cpu_s
