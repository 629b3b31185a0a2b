"""`python -m campaigns.soak`: both daemons under a mixed load for hours, and the verdict on what grew.

Guarantee: it exits with 0 only if nothing grew and nothing was left behind; with 1 and the evidence otherwise, and the run's
folder is then kept. With `--plant` a producer leaks, so that 1 is what a working soak gives.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from campaigns.chaos.fleet import Role, Zygote
from campaigns.soak.load import Load, Plan, Record, SoakError
from campaigns.soak.report import DEFAULT_BOUNDS, Bounds, summarize
from protocol.errors import ExitCode
from protocol.runtime.signals import end_on_signals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1.0, help="after the daemons are loaded (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what the daemons, clients and agents do")
    parser.add_argument("--plant", action="store_true", help="put a leak of every kind into one producer, to be found")
    parser.add_argument("--out", type=Path, help="write the summary to this file, and a picture beside it")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder also when all is well")
    arguments = parser.parse_args()
    end_on_signals(ExitCode.INTERRUPTED)  # the daemons end with this process
    folder = Path(tempfile.mkdtemp(prefix="sl-soak-", dir="/tmp"))
    plan = Plan(3600 * arguments.hours, arguments.seed, arguments.plant)
    try:
        summary, record = run(folder, plan, say=lambda text: print(text, flush=True))
    except SoakError as error:
        print(f"{error}\nThe run is in {folder}", file=sys.stderr)
        return 1
    if arguments.out:
        from campaigns.soak.picture import draw

        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")
        draw(record, plan.warm_up_s, arguments.out.with_suffix(".png"))
    print(json.dumps({key: value for key, value in summary.items() if key not in ("problems", "slopes")}, indent=1))
    for problem in summary["problems"]:
        print(problem, file=sys.stderr)
    if summary["ok"] and not arguments.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"{len(summary['problems'])} problems. The run is in {folder}", file=sys.stderr)
    return 0 if summary["ok"] else 1


def run(
    folder: Path,
    plan: Plan,
    bounds: Bounds = DEFAULT_BOUNDS,
    say: Callable[[str], None] = lambda text: None,
    zygotes: Mapping[Role, Zygote] | None = None,
) -> tuple[dict[str, Any], Record]:
    """One soak, its summary and its samples."""
    record = Load(folder, plan, say, zygotes).run()
    summary = summarize(record, warm_up_s=plan.warm_up_s, bounds=bounds)
    return {"duration_s": plan.duration_s, "seed": plan.seed} | summary, record


if __name__ == "__main__":
    sys.exit(main())
