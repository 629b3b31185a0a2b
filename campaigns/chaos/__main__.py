"""`python -m campaigns.chaos`: both daemons under kills, to the end of a run, and the verdict on what they did.

Guarantee: it exits with 0 only if every promise was kept; with 1 and the evidence otherwise, and the run's folder is then
kept. With `--control` a known defect is put in, so that 1 is what a working checker gives.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from campaigns.chaos import aims
from campaigns.chaos.campaign import Campaign
from campaigns.chaos.controls import CONTROLS
from campaigns.chaos.fates import Fate
from campaigns.chaos.fleet import Role, Zygote, zygotes
from campaigns.chaos.run_folder import DEFAULT, Shape, prepare
from campaigns.chaos.slots import CampaignError
from campaigns.chaos.verdict import summarize

CONTROL_FATES = {"ack-before-commit": tuple(Fate("aimed kill", 60.0, "ack.sent", count) for count in (5, 3, 4, 6, 3))}
_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="processes to kill, at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the run and of what happens to it")
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; they are killed and stopped, too")
    parser.add_argument("--iterations", type=int, default=1, help="optimizer steps over every batch")
    parser.add_argument("--staleness", type=int, default=2, help="pipeline.max_staleness (default: %(default)s)")
    parser.add_argument("--sync-interval", type=int, default=1, help="pipeline.sync_interval")
    parser.add_argument("--control", choices=sorted(CONTROLS), help="put a defect into the trainer, to be found")
    parser.add_argument(
        "--retention", action="store_true", help="without replay.keep_all: old groups are deleted under way"
    )
    parser.add_argument(
        "--plain", action="store_true", help="every group is trained once: nothing is replayed, and no prompt returns"
    )
    parser.add_argument("--full", action="store_true", help="lora: null: the weights themselves train, and are patched")
    parser.add_argument("--out", type=Path, help="write the summary to this file")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder also when all is well")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-chaos-"))
    sockets = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
    try:
        with zygotes("campaigns.chaos", folder, folder) as started:
            summary = run(
                folder,
                sockets,
                started,
                kills=arguments.kills,
                seed=arguments.seed,
                num_producers=arguments.producers,
                ranks=arguments.ranks,
                shape=Shape(
                    arguments.staleness,
                    arguments.sync_interval,
                    arguments.iterations,
                    keep_all=not arguments.retention,
                    again=not arguments.plain,
                    full=arguments.full,
                ),
                control=arguments.control,
                say=lambda text: print(text, flush=True),
            )
    except CampaignError as error:
        print(f"{error}\nThe run is in {folder}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "problems"}, indent=1))
    for problem in summary["problems"][:_SHOWN]:
        print(f"{problem['kind']}: {problem['text']}", file=sys.stderr)
    if summary["ok"] and not arguments.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"{len(summary['problems'])} problems. The run is in {folder}", file=sys.stderr)
    return 0 if summary["ok"] else 1


def run(
    folder: Path,
    sockets: Path,
    zygotes: Mapping[Role, Zygote],
    *,
    kills: int,
    seed: int,
    num_producers: int = 3,
    ranks: int = 1,
    shape: Shape = DEFAULT,
    control: str | None = None,
    trainer_fates: tuple[Fate, ...] = (),
    producer_fates: tuple[Fate, ...] = (),
    at_the_end: tuple[str, ...] = aims.FINISH,
    say: Any = lambda text: None,
) -> dict[str, Any]:
    """One campaign and its summary."""
    started = time.monotonic()
    config = prepare(folder, sockets, seed, shape)
    campaign = Campaign(
        folder,
        zygotes,
        kills=kills,
        seed=seed,
        num_producers=num_producers,
        ranks=ranks,
        full=shape.full,
        control=control,
        retention=not shape.keep_all,
        trainer_fates=trainer_fates + CONTROL_FATES.get(control or "", ()),
        producer_fates=producer_fates,
        at_the_end=at_the_end,
        say=say,
    )
    tally = campaign.run()
    wall_s = time.monotonic() - started
    say(f"{tally.kills} kills in {wall_s:.0f} s; training the run again from its journal")
    trains_again = zygotes["trainer"] if shape.keep_all and control is None else None
    return summarize(folder, config, tally, seed=seed, wall_s=wall_s, trains_again=trains_again, ranks=ranks)


if __name__ == "__main__":
    sys.exit(main())
