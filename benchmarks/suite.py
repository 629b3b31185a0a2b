"""Every benchmark of the Makefile, one after the other, and a summary.

    python -m benchmarks.suite [bench-NAME...]

Guarantee: one that fails does not keep the others from running; what each printed is in `runs/bench/bench-NAME.log`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("runs/bench")


def benchmarks(makefile: str) -> list[str]:
    """The targets called bench-NAME, in the order in which they stand there."""
    return re.findall(r"^(bench-[a-z_-]+):", makefile, re.MULTILINE)


def run(name: str, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs one benchmark, showing and keeping what it prints."""
    started = time.monotonic()
    with (
        (folder / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            print(line, end="", flush=True)
            log.write(line)
    return {"benchmark": name, "exit_code": process.returncode, "wall_s": time.monotonic() - started}


def summary(results: Sequence[dict[str, Any]]) -> str:
    rows = ["| benchmark | result | minutes |", "|---|---|---:|"]
    for one in results:
        outcome = "done" if one["exit_code"] == 0 else f"FAILED ({one['exit_code']})"
        rows.append(f"| {one['benchmark']} | {outcome} | {one['wall_s'] / 60:.1f} |")
    return "\n".join(rows)


def main(names: Sequence[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names or benchmarks(Path("Makefile").read_text(encoding="utf-8")):
        print(f"\n{name}", flush=True)
        results.append(run(name, ["make", "--no-print-directory", name], FOLDER))
    (FOLDER / "summary.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{summary(results)}\n\nlogs and numbers: {FOLDER}")
    return int(any(one["exit_code"] for one in results))


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main(sys.argv[1:]))
