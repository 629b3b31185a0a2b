"""The `rl-export` command merges a trained adapter into a full model. It parses first and imports the heavy libraries then."""

from pathlib import Path
from typing import NoReturn

from protocol.command_line import leave, parser
from protocol.command_line import main as run_command
from protocol.config.run import RunConfig
from protocol.errors import ExitCode
from protocol.runtime.processes import uncollected

PROGRAM = "rl-export"


def main() -> NoReturn:
    arguments_parser = parser(PROGRAM, "Merges a trained adapter into its base model and checks that nothing is lost.")
    arguments_parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        default="last",
        help="last, best, the step of a checkpoint, or an adapter's folder (default: %(default)s)",
    )
    arguments_parser.add_argument(
        "--base",
        choices=("original", "dequantized"),
        default="original",
        help="of a run with model.quantization: merge into the base of model.path, or into what the trainer's base is when it is "
        "dequantized (default: %(default)s)",
    )
    arguments_parser.add_argument("--to", metavar="FOLDER", type=Path, help="a new folder (default: RUN_DIR/merged)")
    arguments_parser.add_argument(
        "--push-to-hub", metavar="NAME", help="also upload it to this repository, private if it is new"
    )
    arguments = arguments_parser.parse_args()

    def run(config: RunConfig, gpus: list[int]) -> ExitCode:
        with uncollected():
            from slipstream.export.merge import run

        to = arguments.to or Path(config.run_dir) / "merged"
        dequantized = arguments.base == "dequantized"
        return run(
            config, gpus, which=arguments.checkpoint, to=to, repository=arguments.push_to_hub, dequantized=dequantized
        )

    leave(run_command(arguments, PROGRAM, lambda config: None, run))


if __name__ == "__main__":
    main()
