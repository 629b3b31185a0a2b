"""The `rl-reward` command scores completions with the rewards of a run, before the run.

Guarantee: `--help` imports no heavy library; nothing is written and no run is touched; every error is one line on standard
error and ends the process with its own exit code; `ExitCode.NO_SIGNAL` says that there is nothing to learn from.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from protocol.command_line import add_config
from protocol.config.loader import load_config
from protocol.errors import ExitCode
from protocol.gpu.nvml import select_gpus
from protocol.runtime import logs
from protocol.runtime.json_lines import encode_line
from slipstream.command import run_tool, tool_parser, whole

PROGRAM = "rl-reward"
_NUMBER = partial(whole, least=1, most=4096)


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    logs.configure(PROGRAM)
    return run_tool(PROGRAM, lambda: _try(chosen))


def _try(chosen: argparse.Namespace) -> ExitCode:
    config = load_config(chosen.config, chosen.overrides)
    gpus = select_gpus(chosen.gpu)

    from slipstream.rewards.report import report, show
    from slipstream.rewards.trial import given, sampled, scored
    from slipstream.run_inputs import RunInputs

    inputs = RunInputs(config)
    if chosen.completions is not None:
        groups = given(chosen.completions, inputs.tokenizer())
    else:
        groups = sampled(config, inputs, chosen.prompts, chosen.n, "cuda" if gpus else "cpu")
    found = report(scored(config, inputs.tokenizer(), groups))
    if chosen.json:
        sys.stdout.write(encode_line(found) + "\n")
    else:
        from rich.console import Console

        show(found, Console())
    return ExitCode.OK if any(group["signal"] for group in found["groups"]) else ExitCode.NO_SIGNAL


def _parser() -> argparse.ArgumentParser:
    result = tool_parser(PROGRAM, "Tries the rewards of a run on completions, without a run.")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", required=True)
    tried = commands.add_parser(
        "try",
        help="score completions of the base model, or given ones, and show what every reward says",
        description="Exit code 67 says that no group had rewards that differ.",
    )
    add_config(tried)
    for flag, default, what in (("--n", 8, "completions per prompt"), ("--prompts", 2, "first prompts of the dataset")):
        tried.add_argument(flag, metavar="N", type=_NUMBER, default=default, help=f"{what} (default: {default})")
    tried.add_argument(
        "--completions",
        metavar="FILE.jsonl",
        type=Path,
        help='score these instead: {"prompt": ..., "completions": [...]} with the columns that the rewards need, one per line',
    )
    tried.add_argument(
        "--gpu", metavar="N|cpu", default="cpu", help="where completions are sampled (default: %(default)s)"
    )
    tried.add_argument("--json", action="store_true", help="for programs: one JSON object")
    return result


if __name__ == "__main__":
    sys.exit(main())
