"""Tokens per second without a policy, beside an adapter and merged, and gaps at swaps: `benchmarks.swap_modes`."""

import json

from benchmarks import swap_modes
from benchmarks.gpu_check.place import Findings, Place

_SHAPES = {"cpu": "0.6M", "cuda": "0.5B"}


def run(place: Place) -> Findings:
    out = place.folder / "decode.json"
    requests, rounds, length = (["8"], 2, 16) if place.on_cpu else (["64", "256"], 5, 256)
    arguments = ["--device", place.device, "--models", _SHAPES[place.device], "--requests", *requests]
    swap_modes.main([*arguments, "--rounds", str(rounds), "--length", str(length), "--out", str(out)])
    [found] = json.loads(out.read_text(encoding="utf-8")).values()
    gaps = found.pop("gaps")
    for load, arms in found.items():
        for arm, values in arms.items():
            low, middle, high = values["share_of_plain_wall"]
            shares = {"share_of_plain": middle, "lower_quartile": low, "upper_quartile": high}
            yield {"what": f"{load}, {arm}", "tokens_per_s": values["tokens_per_s"], **shares}
    for arm, values in gaps.items():
        yield {"what": f"swaps, {arm}", **values}
