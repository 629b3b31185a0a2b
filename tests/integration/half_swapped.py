"""vLLM's workers as ours, of which the second takes other weights where a file beside the adapter says so."""

from pathlib import Path
from typing import Any

from producer.engine.adapter_worker import AdapterWorker
from producer.engine.merged_worker import MergeWorker

INSTEAD = "second-worker-takes"
"""Name of a file in an adapter's folder: the path of another adapter."""


def taken(worker: Any, path: str) -> str:
    instead = Path(path) / INSTEAD
    return instead.read_text() if worker.rank == 1 and instead.exists() else path


class HalfLoading(AdapterWorker):
    def loading_prepare(self, request: tuple[str, int, str]) -> None:
        name, number, path = request
        super().loading_prepare((name, number, taken(self, path)))


class HalfMerging(MergeWorker):
    def merging_prepare(self, path: str | None) -> None:
        super().merging_prepare(path and taken(self, path))
