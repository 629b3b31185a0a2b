"""The `rl-journal` command looks into a run's journal, also while the trainer is running.

Guarantee: it never changes the journal; `--help` imports no heavy library; every error is one line on standard error and
ends the process with its own exit code.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from protocol.errors import ExitCode
from replay.journal.rows import STATES, GroupFilter
from slipstream.command import add_run, run_place, run_tool, tool_parser, whole
from slipstream.journal.stats import stats
from slipstream.journal.views import lineage, list_groups, quarantine
from slipstream.run_reader import RunReader

PROGRAM = "rl-journal"
VERDICTS = ("failed", "solved", "mixed", "unscored")  # as in replay.prompts.rerolls, which this command need not import


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    return run_tool(PROGRAM, lambda: _look(chosen))


def _look(chosen: argparse.Namespace) -> ExitCode:
    """Runs one command, which imports the heavy libraries that it needs."""
    with closing(RunReader(run_place(chosen)).journal()) as reader:
        match chosen.command:
            case "stats":
                stats(reader, as_json=chosen.json)
            case "list":
                list_groups(reader.rows(_wanted(chosen), chosen.limit), as_json=chosen.json)
            case "quarantine":
                quarantine(reader, as_json=chosen.json)
            case "lineage":
                lineage(reader, chosen.step)
            case "show":
                from slipstream.journal.show import show

                show(reader, chosen.group, every_token=chosen.tokens)
            case "export":
                from slipstream.journal.export import export

                export(reader, _wanted(chosen), chosen.limit, chosen.to)
            case "backup":
                from slipstream.journal.backup import backup

                backup(reader, chosen.to)
            case "verify":
                from slipstream.journal.verify import verify

                return verify(reader)
    return ExitCode.OK


def _wanted(chosen: argparse.Namespace) -> GroupFilter:
    return GroupFilter(
        chosen.version, chosen.step, chosen.state, chosen.reward, chosen.prompt, chosen.verdict, chosen.replays
    )


def _parser() -> argparse.ArgumentParser:
    result = tool_parser(PROGRAM, "Looks into the journal of a run, also while its trainer is running.")
    add_run(result, "the run's folder, or its journal file")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", required=True)

    counted = commands.add_parser("stats", help="how many groups, steps, policies and failures there are")
    listed = commands.add_parser("list", help="groups, one per line, newest last")
    shown = commands.add_parser("show", help="one group: prompt, completions, rewards, log-probs")
    shown.add_argument("group", metavar="ID", help="as `list` shows it")
    shown.add_argument("--tokens", action="store_true", help="every token with its log-prob")
    exported = commands.add_parser("export", help="groups with their tokens, log-probs and rewards as a file")
    exported.add_argument(
        "--to", metavar="FILE", required=True, type=_export_file, help="FILE.jsonl or FILE.parquet, one row per group"
    )
    copied = commands.add_parser("backup", help="a copy of journal and newest checkpoint that a trainer can go on from")
    copied.add_argument("--to", metavar="FOLDER", required=True, type=Path, help="a new folder")
    commands.add_parser("verify", help="read everything, say what is wrong, and exit 74 if anything is")
    refused = commands.add_parser("quarantine", help="groups, frames and prompts that were given up, and why")
    made = commands.add_parser("lineage", help="which groups made a step, and which policy it made")
    made.add_argument("step", metavar="STEP", type=whole)

    for command in (counted, listed, refused):
        command.add_argument("--json", action="store_true", help="for programs: one JSON object per line")
    for command, limit in ((listed, 50), (exported, 0)):
        command.add_argument("--version", metavar="N[:M]", type=_range, help="policy version that generated the group")
        command.add_argument(
            "--step", metavar="N[:M]", type=_range, help="optimizer step that trains the group for the first time"
        )
        command.add_argument("--state", choices=STATES, help="what became of it")
        command.add_argument(
            "--reward", metavar="MIN:MAX", type=_rewards, help="mean reward; write --reward=-1:0 for negative ones"
        )
        command.add_argument("--verdict", choices=VERDICTS, help="what the judging reward said of its completions")
        command.add_argument("--replays", metavar="N[:M]", type=_range, help="how often it was replayed")
        command.add_argument("--prompt", metavar="ID", type=whole, help="number of the prompt in the dataset")
        command.add_argument(
            "--limit", metavar="N", type=whole, default=limit, help="the newest N, 0 for all (default: %(default)s)"
        )
    for command in commands.choices.values():  # behind the command, too
        add_run(command, "the run's folder, or its journal file", argparse.SUPPRESS)
    return result


def _range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition(":")
    bounds = whole(first), whole(last if separator else first)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} is empty, the larger number comes last")
    return bounds


def _rewards(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers such as 0.5:1 (got {text!r})") from None
    if not low <= high:
        raise argparse.ArgumentTypeError(f"{text} is empty, the larger number comes last")
    return low, high


def _export_file(text: str) -> Path:
    if not text.endswith((".jsonl", ".parquet")):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .jsonl or .parquet (got {text!r})")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
