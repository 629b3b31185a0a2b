"""`slipstream status` shows what a run does now, in a terminal or as JSON.

Guarantee: it only reads, imports no heavy library, and works with whichever daemons answer. With `--once`, `ExitCode.NO_ANSWER`
means that no daemon answers, and that the run has not finished.
"""

import io
import sys
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from protocol.errors import ConfigError, ExitCode
from protocol.runtime.signals import StopFlag
from slipstream.options import Address, Command, named_run, run_option

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from slipstream.run_reader import RunReader
    from slipstream.status.reading import View
    from slipstream.status.watch import Watch

_EVERY_S = 2.0


@click.command(cls=Command)
@run_option("the run's folder; not needed with --url")
@click.option(
    "--url",
    "addresses",
    type=Address(),
    multiple=True,
    help="where a daemon serves its status, also one of another host (may be repeated)",
)
@click.option(
    "--every",
    metavar="S",
    type=click.FloatRange(0.1, 3600),
    help=f"seconds between two looks (default: {_EVERY_S:g}); with --once: look twice, for rates over that time",
)
@click.option("--once", is_flag=True, help="print one view and end")
@click.option("--json", "as_json", is_flag=True, help="with --once: one JSON object, for programs")
def status(addresses: tuple[str, ...], every: float | None, once: bool, as_json: bool) -> ExitCode:
    """Show what a run does now.

    It shows whether the run learns, who waits for whom, and what to do.
    """
    if every != every:  # NaN is in no range, and no type of click refuses it
        raise click.UsageError("--every: expected seconds", click.get_current_context())
    if as_json and not once:
        raise click.UsageError("--json goes with --once", click.get_current_context())
    from slipstream.status.watch import Watch

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of lines and bars, which escapes would make unreadable
    watch = Watch(_run(by_address=bool(addresses)), addresses)
    if once:
        return _once(watch, every, as_json=as_json)
    with suppress(KeyboardInterrupt):  # Ctrl-C is how one leaves the live view
        _forever(watch, every or _EVERY_S, StopFlag())
    return ExitCode.OK


def _once(watch: "Watch", every_s: float | None, *, as_json: bool) -> ExitCode:
    from rich.console import Console

    from protocol.runtime.json_lines import encode_page
    from slipstream.status.warnings import as_dict

    shown = watch.look()
    if every_s:
        time.sleep(every_s)
        shown = watch.look()
    if as_json:
        sys.stdout.write(encode_page(as_dict(shown)))
    else:
        console = Console()
        console.print(_rendered(shown, console))
    has_finished = shown.ended is not None and shown.ended.finished
    return ExitCode.OK if shown.answers or has_finished else ExitCode.NO_ANSWER


def _rendered(shown: "View", console: "Console") -> "RenderableType":
    from slipstream.status.render import render
    from slipstream.status.warnings import warnings

    return render(shown, warnings(shown), console.width)


def _forever(watch: "Watch", every_s: float, stop: StopFlag) -> None:
    """Redraw on a terminal; elsewhere write one view below the other. Raises KeyboardInterrupt in the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            shown = _rendered(watch.look(), console)
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            stop.sleep(every_s)


def _run(*, by_address: bool) -> "RunReader | None":
    from slipstream.run_reader import RunReader

    named = named_run()
    if named == (None, None) and by_address:
        return None
    run = RunReader(named.path())
    if named.config is None and not run.is_run():
        raise ConfigError(f"--run {named.path()}: no daemon has worked there; name the run_dir of the run's file")
    return run
