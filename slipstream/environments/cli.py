"""The `rl-environment` command writes the rows of another library's environment as a dataset that a trainer takes.

Guarantee: `--help` imports no heavy library; the file is there whole or not at all; every error is one line on standard error and
ends the process with its own exit code.
"""

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from protocol.command_line import add_config
from protocol.config.loader import load_config
from protocol.errors import ConfigError, DatasetError, ExitCode
from protocol.runtime import logs
from protocol.runtime.files import staged
from protocol.runtime.json_lines import encode_line
from slipstream.command import run_tool, tool_parser, whole

PROGRAM = "rl-environment"


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    logs.configure(PROGRAM)
    return run_tool(PROGRAM, lambda: asyncio.run(_write_rows(chosen)))


async def _write_rows(chosen: argparse.Namespace) -> ExitCode:
    from producer.environments.agent_program import rows

    section = load_config(chosen.config, chosen.overrides).environment
    if not section.is_played_outside:
        raise ConfigError(f"{chosen.config}: environment: only verifiers and nemo_gym have rows of their own")
    if section.nemo_gym is not None and chosen.source is None:
        raise ConfigError("name the agent's rows: --from FILE.jsonl, which has `responses_create_params` in every line")
    number = 0
    try:
        with staged(chosen.to) as partial, partial.open("w", encoding="utf-8") as file:
            async for row in rows(section, chosen.max_rows, str(chosen.source or "")):
                file.write(encode_line(row) + "\n")
                number += 1
            if number == 0:
                raise DatasetError(f"the environment has no rows, so {chosen.to} was not written")
    except OSError as error:
        raise DatasetError(f"--to {chosen.to}: {error.strerror}") from error
    sys.stdout.write(f"{chosen.to}: {number} rows\n")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    result = tool_parser(PROGRAM, "Environments of verifiers and NeMo Gym.")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", required=True)
    told = commands.add_parser("rows", help="write the environment's rows as a file for `dataset.path`")
    add_config(told)
    told.add_argument("--to", metavar="FILE.jsonl", type=Path, required=True, help="file to write")
    told.add_argument("--max-rows", metavar="N", type=partial(whole, least=1), help="only the first N (default: all)")
    told.add_argument(
        "--from",
        metavar="FILE.jsonl",
        type=Path,
        dest="source",
        help="rows of a NeMo Gym agent, as its own tools take them",
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
