"""The `rl-producer` command.

Guarantee: heavy libraries are imported after the configuration was accepted. Where vLLM spawns its engine core instead of
forking it, multiprocessing imports this module first, so that the core is tied to the daemon's life from the start.
"""

import sys

from protocol.config.run import RunConfig
from protocol.errors import ExitCode
from protocol.processes.lifeline import follow_parent_if_tied
from protocol.service import command_line

follow_parent_if_tied()


def _check_libraries(config: RunConfig) -> None:
    from producer.engine.vllm_config import check_engine_section

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
