"""`make bench-scale`: how many producers one trainer serves, how soon it acknowledges, and what of a core that takes.

Guarantee: the trainer is the product's but for the model (`benchmarks.acceptor`), in a process and on a core of its own where
there are two, with a real journal on the disk of `--folder`; all producers share the other core. Each has the product's link with
a key and connections of its own (CURVE), and sends at random times (Poisson), whether or not earlier groups are acknowledged.
All cases take turns, and beside each stands, measured just before it, what a single durable append takes on that disk. After the
groups of a paced case the trainer is killed, and another started 8 s later: the time in which all producers are back.
"""

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from benchmarks.made_on import made_on
from benchmarks.storage import raw_appends
from benchmarks.wire import acknowledgements

PRODUCERS = (1, 8, 64, 1000)
_RAW_S = 1.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scale.json"), help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="folder of the disk to measure (default: that of --out)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=3, help="measurements of each case, in turns (default: %(default)s)"
    )
    parser.add_argument("--producers", type=int, nargs="+", default=PRODUCERS, help="how many (default: 1 8 64 1000)")
    parser.add_argument(
        "--offered", type=float, nargs="+", default=(500.0, 0.0), help="groups/s, 0: saturated (default: 500 and 0)"
    )
    arguments = parser.parse_args(argv)
    logging.getLogger("consumer").setLevel(logging.ERROR)  # that producers leave is what they are told to do
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made = made_on()
    cores = sorted(os.sched_getaffinity(0))
    apart = (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
    cases = [(producers, offered) for offered in arguments.offered for producers in arguments.producers]
    runs: dict[tuple[int, float], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.repeat):
        for case in cases:
            with tempfile.TemporaryDirectory(
                prefix="bench-scale-", dir=arguments.folder or arguments.out.parent
            ) as scratch:
                runs[case].append(measure(Path(scratch), *case, arguments.seconds, apart))
    report = made | _report(runs)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)


def measure(
    folder: Path, producers: int, offered_per_s: float, seconds: float, cores: tuple[int | None, int | None]
) -> dict[str, float]:
    raw_ms = raw_appends(folder, _RAW_S) * 1000
    kills = offered_per_s > 0
    one = acknowledgements(folder, producers, offered_per_s, seconds, cores, with_keys=True, kills=kills)
    return {
        "groups_per_s": one.groups_per_s,
        "ack_p50_ms": float(np.percentile(one.latency_s, 50)) * 1000,
        "ack_p99_ms": float(np.percentile(one.latency_s, 99)) * 1000,
        "trainer_cpu": one.trainer_cpu,
        "idle_cpu": one.idle.trainer_cpu,
        "idle_kb": one.idle.bytes_each / 1000,
        "joined_s": one.idle.joined_s,
        "back_s": one.back_s,
        "refused": one.refused,
        "raw_p50_ms": float(np.percentile(raw_ms, 50)),
        "raw_p99_ms": float(np.percentile(raw_ms, 99)),
    }


def _report(runs: dict[tuple[int, float], list[dict[str, float]]]) -> dict[str, Any]:
    return {
        "sqlite": apsw.sqlite_lib_version(),
        "cases": [
            {"producers": producers, "offered_per_s": offered or None, "runs": measured}
            | {
                key: [float(q) for q in np.percentile([run[key] for run in measured], [25, 50, 75])]
                for key in measured[0]
            }
            for (producers, offered), measured in runs.items()
        ],
    }


def _print(report: dict[str, Any]) -> None:
    print("\nmedian (quartiles) of measurements in turns\n")
    print(
        "| producers | offered | groups/s | ack p50 ms | ack p99 ms | trainer, cores | idle | kB each | joined s | back s "
        "| refused | append + fdatasync p50, p99 ms |"
    )
    print("|---:|---|" + "---:|" * 10)
    for case in report["cases"]:
        offered = f"{case['offered_per_s']:.0f}/s" if case["offered_per_s"] else "saturated"
        low, p99, high = case["ack_p99_ms"]
        print(
            f"| {case['producers']} | {offered} | {case['groups_per_s'][1]:,.0f} | {case['ack_p50_ms'][1]:.1f} "
            f"| {p99:.1f} ({low:.1f} to {high:.1f}) | {case['trainer_cpu'][1]:.2f} | {case['idle_cpu'][1]:.2f} "
            f"| {case['idle_kb'][1]:.0f} | {case['joined_s'][1]:.1f} | {case['back_s'][1]:.1f} | {case['refused'][1]:.0f} "
            f"| {case['raw_p50_ms'][1]:.2f}, {case['raw_p99_ms'][1]:.2f} |"
        )


if __name__ == "__main__":
    main()
