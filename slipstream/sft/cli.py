"""The `rl-sft` command trains a supervised warm start. It parses and checks first and imports the heavy libraries then."""

from pathlib import Path
from typing import NoReturn

from protocol.command_line import leave, parser
from protocol.command_line import main as run_command
from protocol.config.run import RunConfig
from protocol.errors import ExitCode
from protocol.runtime.processes import uncollected

PROGRAM = "rl-sft"


def main() -> NoReturn:
    arguments_parser = parser(
        PROGRAM, "Trains an adapter on the completions of the run's dataset, for lora.init_from to start from."
    )
    arguments_parser.add_argument("--to", metavar="FOLDER", type=Path, help="a new folder (default: RUN_DIR/sft)")
    arguments = arguments_parser.parse_args()

    def check_libraries(config: RunConfig) -> None:
        with uncollected():
            from slipstream.sft.trainer import check_libraries

        check_libraries(config)

    def run(config: RunConfig, gpus: list[int]) -> ExitCode:
        with uncollected():
            from slipstream.sft.trainer import run

        return run(config, gpus, to=arguments.to or Path(config.run_dir) / "sft")

    leave(run_command(arguments, PROGRAM, check_libraries, run))


if __name__ == "__main__":
    main()
