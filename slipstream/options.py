"""The options that subcommands share, and how a subcommand ends.

Guarantee: a wrong argument is one line on standard error that names the help, and `ExitCode.USAGE`. A `SlipstreamError` is one
line and its own exit code, a file that the system refuses one line and `ExitCode.CONFIG`, every other exception a traceback and
`ExitCode.BUG`. A reader of the output that ends early, such as `head`, is no error.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click

from protocol.command_line import CHECK, exit_code, written
from protocol.errors import ConfigError, ExitCode

Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST = 999_999_999_999
_RUN = "slipstream.run"


class Command(click.Command):
    """A subcommand. Its function returns an exit code, or None for `ExitCode.OK`."""

    def invoke(self, ctx: click.Context) -> int:
        return exit_code(program(ctx), lambda: written(lambda: self._work(ctx)))

    def _work(self, ctx: click.Context) -> int:
        try:
            return super().invoke(ctx) or ExitCode.OK
        except click.UsageError as error:
            return usage_error(error)


class Group(click.Group):
    """A subcommand that has subcommands."""

    command_class = Command


def usage_error(error: click.ClickException) -> ExitCode:
    """Write one line that names the help."""
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "slipstream"
    message = " ".join(error.format_message().split()).rstrip(".")
    click.echo(f"{' '.join(path.split()[:2])}: error: {message}; see {path} --help", err=True)
    return ExitCode.USAGE


def program(ctx: click.Context | None = None) -> str:
    """Return the name under which a subcommand logs and reports errors, such as `slipstream journal`."""
    return " ".join((ctx or click.get_current_context()).command_path.split()[:2])


class RunOption(NamedTuple):
    """The run that a command line names."""

    run: str | None = None
    config: str | None = None

    def path(self) -> Path:
        """Return the run's folder, or what else `--run` names; `ConfigError` if the configuration cannot be read."""
        if self.config is None:
            return Path(self.run or ".")
        from protocol.config.loader import load_config  # its import takes as long as all others

        return Path(load_config(self.config).run_dir)


def run_option(place: str = "the run's folder, or its journal file") -> Callable[[Function], Function]:
    """Add `--run` and `--config` to a command or to its group; `named_run` returns what they name.

    Args:
        place: what `--run` may name.
    """

    def remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is None:
            return
        named: RunOption = ctx.meta.get(_RUN, RunOption())._replace(**{parameter.name or "": value})
        if None not in named:
            raise click.UsageError("--run and --config exclude each other", ctx)
        ctx.meta[_RUN] = named

    def add(function: Function) -> Function:
        options = (("--run", "RUN_DIR", f"{place} (default: this folder)"), ("--config", "FILE", "the run's YAML file"))
        for flag, metavar, text in reversed(options):
            function = click.option(flag, metavar=metavar, expose_value=False, callback=remember, help=text)(function)
        return function

    return add


def named_run() -> RunOption:
    named: RunOption = click.get_current_context().meta.get(_RUN, RunOption())
    return named


set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    callback=lambda context, parameter, value: list(value),
    help="override one value, e.g. --set pipeline.max_staleness=2 (may be repeated)",
)


def config_options(function: Function) -> Function:
    """Add `--run`, `--config` and `--set`, for a command that needs the whole configuration of a run. Its function gets the file
    and the overrides."""

    @functools.wraps(function)
    def configured(*, run: str | None, config: str | None, overrides: list[str], **options: Any) -> Any:
        if (run is None) == (config is None):
            raise click.UsageError("give --run, or --config for a run that has not begun", click.get_current_context())
        if run is not None:
            config, overrides = _resolved_file(run), [f"run_dir={json.dumps(run)}", *overrides]
        return function(config=config, overrides=overrides, **options)

    text = "a run's folder: takes the configuration with which rl-trainer was last started there"
    decorated = click.option("--config", metavar="FILE", help="the run's YAML file")(set_option(configured))
    return click.option("--run", metavar="RUN_DIR", help=text)(decorated)  # type: ignore[return-value]


def _resolved_file(run: str) -> str:
    from protocol.config.loader import RESOLVED_FILE

    file = Path(run) / RESOLVED_FILE
    if not file.is_file():
        raise ConfigError(
            f"--run {run}: there is no {file}, which rl-trainer writes at its start; give --config instead"
        )
    return str(file)


check_option = click.option("--check", is_flag=True, help=CHECK)

json_option = click.option("--json", "as_json", is_flag=True, help="for programs: one JSON object per line")


class Range(click.ParamType):  # type: ignore[type-arg]  # generic in some releases
    """`N:M`, or one number. The value is the pair of bounds."""

    def __init__(self, number: "click.ParamType[Any]") -> None:
        self.name = "N[:M]"
        self._number = number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        first, separator, last = value.partition(":")
        bounds = [self._number.convert(text, param, ctx) for text in (first, last if separator else first)]
        if not bounds[0] <= bounds[1]:
            self.fail(f"{value} is empty; the larger number comes last", param, ctx)
        return tuple(bounds)


class Address(click.ParamType):  # type: ignore[type-arg]
    """`HOST:PORT`, also within a URL of HTTP."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        address = value.removeprefix("http://").partition("/")[0]
        try:
            place = urlsplit(f"//{address}")
            if place.hostname and place.port and "@" not in address:
                return address
        except ValueError:
            pass
        return self.fail(f"expected HOST:PORT, such as 127.0.0.1:9100 (got {value!r})", param, ctx)
