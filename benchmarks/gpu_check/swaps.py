"""Policies from a trainer on the GPU to an engine on the same GPU while requests decode: `benchmarks.swap`."""

import json
import statistics
from itertools import groupby

from benchmarks import swap
from benchmarks.gpu_check.place import Findings, Place

_NUMBERS = ("live_s", "snapshot_s", "transfer_s", "load_and_prove_s", "longest_gap_s", "ordinary_gap_s")


def run(place: Place, mode: str) -> Findings:
    out = place.folder / "swap.json"
    sizes, repeat = (["1"], "1") if place.on_cpu else (["40", "160"], "3")
    swap.main(["--device", place.device, "--mode", mode, "--sizes", *sizes, "--repeat", repeat, "--out", str(out)])
    swaps = json.loads(out.read_text(encoding="utf-8"))["swaps"]
    for (size, way), taken in groupby(sorted(swaps, key=_kind), key=_kind):
        rows = list(taken)
        numbers = {name: statistics.median(row[name] for row in rows) for name in _NUMBERS if name in rows[0]}
        yield {"what": f"{size} MB, {way}", "swaps": len(rows), **numbers}


def _kind(one: dict[str, object]) -> tuple[int, str]:
    return int(str(one["size_mb"])), str(one["way"])
