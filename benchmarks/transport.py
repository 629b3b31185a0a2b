"""`make bench-transport`: what a group costs on its way from a producer to the journal's door, in time and CPU.

Guarantee: two processes, each on a core of its own, send groups of 8 x 512 tokens through the product's channels and codec
with the checks of the intake; beside it, in turns in the same run, pickles over PUSH/PULL (no checksum, no check, no
acknowledgement) and the copy of as many bytes in memory.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from benchmarks.groups import GroupFactory
from benchmarks.transport_side import PRODUCER, Side, Spent
from protocol.channel.keys import AUTHORIZED, generate

_Case = tuple[Literal["protocol", "pickle"], Literal["ipc", "tcp"], bool]  # and whether with keys
CASES: dict[str, _Case] = {
    "ipc": ("protocol", "ipc", False),
    "tcp": ("protocol", "tcp", False),
    "ipc + CURVE": ("protocol", "ipc", True),
    "tcp + CURVE": ("protocol", "tcp", True),
    "pickle over PUSH/PULL, ipc": ("pickle", "ipc", False),
    "pickle over PUSH/PULL, tcp": ("pickle", "tcp", False),
}
_COPIES = 20_000
_ENDS_WITHIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/transport.json"), help="JSON file to write")
    parser.add_argument("--groups", type=int, default=10_000, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="measurements of each case, in turns (default: %(default)s)"
    )
    arguments = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    copied = []
    for _ in range(arguments.repeat):
        copied.append(_copy_us())
        for name, case in CASES.items():
            measured[name].append(measure(case, arguments.groups))
    report = _report(measured, copied)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)


def measure(case: _Case, groups: int) -> dict[str, float]:
    """Groups per second, and microseconds of CPU per group on each side."""
    wire, transport, with_keys = case
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as folder:
        own = (f"ipc://{folder}/c", f"ipc://{folder}/c.blobs")
        control, blobs = own if transport == "ipc" else free_ports(2)
        keys = _make_keys(Path(folder) / "keys") if with_keys else None
        sides = [
            _start(Side(wire, "receiver", control, blobs, keys, cores[0], groups)),
            _start(Side(wire, "sender", control, blobs, keys, cores[-1], groups)),
        ]
        try:
            receiver, sender = (_result(side) for side in sides)
        finally:
            for side in sides:
                side.kill()
                side.communicate()
    return {
        "groups_per_s": groups / receiver.seconds,
        "receiver_cpu_us": receiver.cpu_s / groups * 1e6,
        "sender_cpu_us": sender.cpu_s / groups * 1e6,
    }


def _start(side: Side) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.transport_side", msgspec.json.encode(side).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result(side: "subprocess.Popen[str]") -> Spent:
    output, _ = side.communicate(timeout=_ENDS_WITHIN_S)
    return msgspec.json.decode(output, type=Spent)


def _make_keys(folder: Path) -> str:
    for name in ("trainer", PRODUCER):
        generate(folder, name)
    shutil.copy(folder / f"{PRODUCER}.public", folder / AUTHORIZED)
    return str(folder)


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return [f"tcp://127.0.0.1:{port}" for port in ports]


def _copy_us() -> float:
    """Microseconds to copy the bytes of one group, of many in turn."""
    size = len(GroupFactory(0).frame("0-0-0-1-bench"))
    sources = [np.full(size, number, np.uint8) for number in range(64)]
    target = np.empty((64, size), np.uint8)
    started = time.perf_counter()
    for number in range(_COPIES):
        np.copyto(target[number % 64], sources[number % 64])
    return (time.perf_counter() - started) / _COPIES * 1e6


def _report(measured: dict[str, list[dict[str, float]]], copied: list[float]) -> dict[str, Any]:
    return {
        "group_bytes": len(GroupFactory(0).frame("0-0-0-1-bench")),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "libzmq": zmq.zmq_version()},
        "memcpy_us": _quartiles(copied),
        "cases": {
            name: {key: _quartiles([run[key] for run in runs]) for key in runs[0]} | {"runs": runs}
            for name, runs in measured.items()
        },
        "of_pickle": {
            transport: _quartiles(
                [
                    ours["receiver_cpu_us"] / theirs["receiver_cpu_us"]
                    for ours, theirs in zip(
                        measured[transport], measured[f"pickle over PUSH/PULL, {transport}"], strict=True
                    )
                ]
            )
            for transport in ("ipc", "tcp")
        },
    }


def _quartiles(values: list[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


def _print(report: dict[str, Any]) -> None:
    print(f"\none group: {report['group_bytes']:,} bytes; median (quartiles) of measurements in turns\n")
    print("| wire | groups/s | receiver, us CPU a group | sender, us CPU a group |\n|---|---:|---:|---:|")
    for name, case in report["cases"].items():
        cells = (
            "{1:,.0f} ({0:,.0f} to {2:,.0f})".format(*case[key])
            for key in ("groups_per_s", "receiver_cpu_us", "sender_cpu_us")
        )
        print(f"| {name} | {' | '.join(cells)} |")
    print("| memcpy | | {1:.1f} ({0:.1f} to {2:.1f}) | |".format(*report["memcpy_us"]))
    for transport, ratio in report["of_pickle"].items():
        print(f"receiver's CPU against pickle's over {transport}: {ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})")


if __name__ == "__main__":
    main()
