"""The command `slipstream`, and the subcommands that hand their options to one function.

Guarantee: `--help` and `--check` import no heavy library. Every error is one line on standard error and ends the process with its
own exit code (`slipstream.options`).
"""

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import click

from protocol import __version__
from protocol.command_line import leave, print_progress
from protocol.command_line import main as run_configured
from protocol.errors import ConfigError, DatasetError, ExitCode
from protocol.gpu.nvml import VISIBLE, select_gpus, visible_gpus
from protocol.runtime import logs
from protocol.runtime.processes import gc_disabled
from protocol.runtime.signals import end_on_signals
from slipstream.options import Command, Function, Group, check_option, config_options, program, usage_error
from slipstream.tables import write_json

_COMMANDS = {
    "init": "slipstream.init:init",
    "run": "slipstream.run:run",
    "status": "slipstream.status.cli:status",
    "journal": "slipstream.journal.cli:journal",
    "sft": "slipstream.cli:sft",
    "export": "slipstream.cli:export",
    "inspect": "slipstream.cli:inspect",
    "score": "slipstream.cli:score",
    "reward": "slipstream.cli:reward",
    "environment": "slipstream.cli:environment",
    "keys": "slipstream.keys:keys",
    "env": "slipstream.env:env",
}
"""The place of each subcommand. Their modules import at their head no more than `--help` needs."""
_GROUP = "slipstream.commands"
"""The entry points of the subcommands of extras and of other packages."""


def main() -> NoReturn:
    """Run the command of this process and end it, as console scripts and `python -m slipstream` do."""
    end_on_signals(ExitCode.INTERRUPTED)
    leave(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return int(slipstream.main(arguments, prog_name="slipstream", standalone_mode=False) or ExitCode.OK)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.ClickException as error:
        return usage_error(error)
    except click.Abort:
        return ExitCode.INTERRUPTED
    return ExitCode.USAGE


class _LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *sorted(entry_points(group=_GROUP).names)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = None
        if cmd_name in _COMMANDS:
            command = pkgutil.resolve_name(_COMMANDS[cmd_name])
        elif cmd_name in (installed := entry_points(group=_GROUP)).names:
            command = installed[cmd_name].load()
        return command


@click.command(cls=_LazyGroup)
@click.version_option(__version__, message="%(prog)s %(version)s")
def slipstream() -> None:
    """Commands beside rl-producer and rl-trainer.

    Exit codes are those of docs/operations.md. Completion of a shell: `eval "$(_SLIPSTREAM_COMPLETE=bash_source slipstream)"`,
    or zsh_source or fish_source.
    """


def _gpu_option() -> Callable[[Function], Function]:
    def or_first(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
        return value or ("0" if visible_gpus(os.environ.get(VISIBLE)) else "cpu")

    text = "index as nvidia-smi counts, a list, a UUID, or cpu"
    default = "0, or cpu where there is none"
    return click.option("--gpu", metavar="N[,N]|cpu", callback=or_first, show_default=default, help=text)


@click.command(cls=Command)
@config_options
@check_option
@_gpu_option()
@click.option("--to", metavar="FOLDER", type=click.Path(path_type=Path), help="a new folder (default: RUN_DIR/sft)")
@click.option("--resume", is_flag=True, help="go on from the last checkpoint (sft.save_steps) of one that was cut off")
def sft(to: Path | None, resume: bool, **options: Any) -> int:
    """Train an adapter as a warm start.

    It learns the completions of the dataset. The run takes it with lora.init_from.
    """

    given = to and to.absolute()  # what works below works in another folder

    def work(config: Any, gpus: list[int]) -> ExitCode:
        with gc_disabled():
            from slipstream.sft import run

        return run(config, gpus, to=given or Path(config.run_dir) / "sft", resume=resume)

    return run_configured(argparse.Namespace(**options), program(), work)


@click.command(cls=Command)
@config_options
@check_option
@_gpu_option()
@click.option(
    "--checkpoint",
    metavar="WHICH",
    default="last",
    show_default=True,
    help="last, best, the step of a checkpoint, or an adapter's folder",
)
@click.option(
    "--base",
    type=click.Choice(("original", "dequantized")),
    default="original",
    show_default=True,
    help="of a run with model.quantization: merge into the base of model.path, or into the trainer's base, dequantized",
)
@click.option(
    "--to", metavar="FOLDER", type=click.Path(path_type=Path), help="a new folder (default: RUN_DIR/merged or exported)"
)
@click.option(
    "--adapter", "is_adapter", is_flag=True, help="the adapter alone, for PEFT and for vllm serve --enable-lora"
)
@click.option("--push-to-hub", metavar="NAME", help="also upload it to this repository, private if it is new")
def export(
    checkpoint: str, base: str, to: Path | None, is_adapter: bool, push_to_hub: str | None, **options: Any
) -> int:
    """Merge a trained adapter into its base model, or write the adapter, with a model card.

    The merged model is read back, and must compute what base model and adapter compute together.
    """

    given = to and to.absolute()  # what works below works in another folder
    which = checkpoint if checkpoint in ("last", "best") or checkpoint.isdigit() else os.path.abspath(checkpoint)

    def work(config: Any, gpus: list[int]) -> ExitCode:
        with gc_disabled():
            from slipstream.export import run

        folder = given or Path(config.run_dir) / ("exported" if is_adapter else "merged")
        return run(
            config,
            gpus,
            which=which,
            to=folder,
            repository=push_to_hub,
            dequantized=base == "dequantized",
            is_adapter=is_adapter,
        )

    return run_configured(argparse.Namespace(**options), program(), work)


@click.command(cls=Command)
@config_options
@click.option("--n", type=click.IntRange(1, 4096), default=1, show_default=True, help="first prompts of the dataset")
@click.option("--json", "as_json", is_flag=True, help="for programs: one JSON object")
def inspect(config: str, overrides: list[str], n: int, as_json: bool) -> None:
    """Show prompts as the policy gets them: text, tokens, what ends a completion, and what is trained."""
    from protocol.config.loader import load_config
    from protocol.config.places import working_in

    logs.configure(program())
    loaded = load_config(config, overrides)

    from slipstream.inspection import inspected, show

    with working_in(loaded.folder):
        found = inspected(loaded, n)
    write_json(found) if as_json else show(found)


@click.command(cls=Command)
@config_options
@check_option
@_gpu_option()
@click.option(
    "--rows",
    metavar="FILE.jsonl",
    type=click.Path(path_type=Path),
    required=True,
    help='{"prompt": ..., "completion": ...} as text or messages, or {"prompt_ids": [...], "completion_ids": [...]} per line',
)
@click.option(
    "--policy",
    metavar="WHICH",
    default="last",
    show_default=True,
    help="last, best, the step of a checkpoint, a folder, or base",
)
@click.option("--to", metavar="FILE.jsonl", type=click.Path(path_type=Path), required=True, help="a line for each row")
def score(rows: Path, policy: str, to: Path, **options: Any) -> int:
    """Write the log-probs of given completions under a policy of the run, as the trainer sees it.

    A text counts as it is, without an end; a message with its end of turn. Log-probs are at sampling.temperature.
    """

    given, written = rows.absolute(), to.absolute()  # what works below works in another folder
    which = policy if policy in ("last", "best", "base") or policy.isdigit() else os.path.abspath(policy)

    def work(config: Any, gpus: list[int]) -> ExitCode:
        with gc_disabled():
            from slipstream.score import run

        return run(config, gpus, which=which, rows_file=given, to=written)

    return run_configured(argparse.Namespace(**options), program(), work)


@click.group(cls=Group)
def reward() -> None:
    """Try the rewards of a configuration."""
    logs.configure(program())


@reward.command("try")
@config_options
@click.option("--n", type=click.IntRange(1, 4096), default=8, show_default=True, help="completions per prompt")
@click.option(
    "--prompts", type=click.IntRange(1, 4096), default=2, show_default=True, help="first prompts of the dataset"
)
@click.option(
    "--completions",
    metavar="FILE.jsonl",
    type=click.Path(path_type=Path),
    help='score these instead: {"prompt": ..., "completions": [...]} with the columns that the rewards need, one per line',
)
@_gpu_option()
@click.option("--json", "as_json", is_flag=True, help="for programs: one JSON object")
def try_rewards(
    config: str, overrides: list[str], n: int, prompts: int, completions: Path | None, gpu: str, as_json: bool
) -> ExitCode:
    """Score completions of the base model, or given ones, and show the result of every reward.

    Exit code 66 means that a reward scored nothing, and 67 that no group had rewards that differ.
    """
    from protocol.config.loader import load_config
    from protocol.config.places import working_in

    loaded = load_config(config, overrides)
    gpus = select_gpus(gpu)

    from slipstream.reward import given, report, sampled, scored, show
    from slipstream.run_inputs import RunInputs

    answers = completions and completions.absolute()
    with working_in(loaded.folder):
        inputs = RunInputs(loaded)
        if answers is not None:
            groups = given(answers, inputs.tokenizer())
        else:
            groups = sampled(loaded, inputs, prompts, n, "cuda" if gpus else "cpu")
        found = report(scored(loaded, inputs.tokenizer(), groups))
    if as_json:
        write_json(found)
    else:
        from rich.console import Console

        show(found, Console())
    if found["dead_rewards"]:
        return ExitCode.DATA_FAILURES
    return ExitCode.OK if any(group["signal"] for group in found["groups"]) else ExitCode.NO_SIGNAL


@click.group(cls=Group)
def environment() -> None:
    """Write the rows of an environment."""
    logs.configure(program())


@environment.command("rows")
@config_options
@click.option(
    "--to", metavar="FILE.jsonl", type=click.Path(path_type=Path), required=True, help="the file, for dataset.path"
)
@click.option("--max-rows", type=click.IntRange(1), help="only the first N (default: all)")
@click.option(
    "--from", "source", metavar="FILE.jsonl", help="rows of a NeMo Gym agent, in the form that its own tools take"
)
@click.option("--environment", "name", metavar="NAME", default="", help="which of `environments`, if there are several")
def write_rows(
    config: str, overrides: list[str], to: Path, max_rows: int | None, source: str | None, name: str
) -> None:
    """Write the environment's rows. The file appears whole or not at all."""
    import asyncio

    given = os.path.abspath(source) if source else ""  # what works below works in another folder
    asyncio.run(_write_rows(config, overrides, to, max_rows, given, name))


async def _write_rows(file: str, overrides: list[str], to: Path, max_rows: int | None, source: str, name: str) -> None:
    from producer.environments.agent_program import rows
    from protocol.config.loader import load_config
    from protocol.config.places import working_in
    from protocol.runtime.files import staged
    from protocol.runtime.json_lines import encode_line

    config = load_config(file, overrides)
    if name not in config.by_environment and (name or config.environments):
        known = ", ".join(config.by_environment) or "one without a name"
        raise ConfigError(f"{file}: --environment {name!r} is not one of its environments: {known}")
    section = config.by_environment.get(name, config.environment)
    if not section.is_played_outside:
        raise ConfigError(f"{file}: {section.key}.agent: rows are those of an agent program's environment; set it")
    number = 0
    try:
        with staged(to) as partial, partial.open("w", encoding="utf-8") as stream:
            with working_in(config.folder):
                async for row in rows(section, max_rows, source):
                    stream.write(encode_line(row) + "\n")
                    number += 1
            if number == 0:
                raise DatasetError(f"the environment has no rows, so {to} was not written")
    except OSError as error:
        raise DatasetError(f"--to {to}: {error.strerror}") from error
    print_progress(f"{to}: {number} rows")
