"""The `rl-producer` command.

Guarantee: heavy libraries are imported after the configuration was accepted. multiprocessing imports this module first
in every process it spawns, so the engine core is tied to the daemon's life before it does anything.
"""

import multiprocessing
import sys

from producer.lifeline import die_with_parent, leave_ctrl_c_to_parent
from protocol import command_line
from protocol.config import RunConfig
from protocol.errors import ExitCode

if (_parent := multiprocessing.parent_process()) is not None and _parent.pid is not None:
    die_with_parent(_parent.pid)
    leave_ctrl_c_to_parent()


def _check_libraries(config: RunConfig) -> None:
    from producer.engine import check_engine_section

    check_engine_section(config)


def _run(config: RunConfig, gpus: list[int]) -> ExitCode:
    from producer.daemon import run

    return run(config, gpus)


def main() -> int:
    parser = command_line.parser(
        "rl-producer", "Generates groups of completions with vLLM, scores them and ships them to rl-trainer."
    )
    return command_line.main(parser.parse_args(), "rl-producer", _check_libraries, _run)


if __name__ == "__main__":
    sys.exit(main())
