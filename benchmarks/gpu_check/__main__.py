"""`make gpu-check`, or `python -m benchmarks.gpu_check --gpu 0 --minutes 15 --out runs/gpu-check`.

Exit status: 0, or 1 if a part failed or was too slow. A part that this machine cannot run is neither.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_check import report
from benchmarks.gpu_check.plan import ARMS, PLAN, planned
from benchmarks.gpu_check.runner import Outcome, run_parts
from protocol.errors import SlipstreamError
from protocol.gpu.nvml import select_gpus


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="0", metavar="N[,N]|cpu", help="as nvidia-smi counts (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="5, 15 and 30 are planned for (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder (default: %(default)s)")
    names = [part.name for part in (*PLAN, *ARMS)]
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=f"these alone: {', '.join(names)}")
    parser.add_argument("--plan", action="store_true", help="show what would run in which order, and run nothing")
    arguments = parser.parse_args(argv)
    parts = (
        [part for part in (*PLAN, *ARMS) if part.name in arguments.parts]
        if arguments.parts
        else planned(arguments.minutes)
    )
    if arguments.plan:
        print("\n".join(f"{part.name:15}{part.expected_s:4} s  {part.about}" for part in parts))
        return 0
    try:
        gpus = select_gpus(arguments.gpu)
    except SlipstreamError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.out.absolute()))
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report.write(arguments.out, gpus, arguments.minutes, outcomes)
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.part}: {outcome.status} after {outcome.seconds:.0f} s{reason}", flush=True)
        for finding in outcome.findings:
            print(f"  {json.dumps(finding)}", flush=True)

    asyncio.run(run_parts(parts, gpus, out, 60 * arguments.minutes, note))
    print(f"\n{report.table(outcomes)}\n\n{arguments.out}/results.json, {arguments.out}/table.md; logs: {out}")
    return int(any(outcome.status in ("failed", "too slow") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
