"""The `rl-status` command shows what a run does now, in a terminal or as JSON.

Guarantee: it only reads, imports no heavy library, and works with whichever daemons answer. Every error is one line on standard
error and ends the process with its own exit code; with `--once`, `ExitCode.NO_ANSWER` says that no daemon answers.
"""

import argparse
import io
import sys
import time
from contextlib import nullcontext
from typing import NoReturn
from urllib.parse import urlsplit

from rich.console import Console, RenderableType
from rich.live import Live

from protocol.errors import ConfigError, ExitCode
from protocol.runtime.json_lines import encode_page
from slipstream.command import add_run, run_place, run_tool, tool_parser
from slipstream.run_reader import RunReader
from slipstream.status.render import render
from slipstream.status.view import View
from slipstream.status.warnings import warnings
from slipstream.status.watch import Watch

PROGRAM = "rl-status"
_EVERY_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    chosen = _parsed(arguments)
    return run_tool(PROGRAM, lambda: _show(chosen), interrupted=ExitCode.OK)  # Ctrl-C is how one leaves the live view


def _show(chosen: argparse.Namespace) -> ExitCode:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of lines and bars, which escapes would make unreadable
    watch = Watch(_run(chosen), chosen.url)
    return _once(watch, chosen) if chosen.once else _forever(watch, chosen.every or _EVERY_S)


def _once(watch: Watch, chosen: argparse.Namespace) -> ExitCode:
    shown = watch.look()
    if chosen.every:
        time.sleep(chosen.every)
        shown = watch.look()
    if chosen.json:
        found = shown.as_dict() | {"warnings": [warning._asdict() for warning in warnings(shown)]}
        sys.stdout.write(encode_page(found))
    else:
        console = Console()
        console.print(_rendered(shown, console))
    return ExitCode.OK if shown.answers else ExitCode.NO_ANSWER


def _rendered(shown: View, console: Console) -> RenderableType:
    return render(shown, warnings(shown), console.width)


def _forever(watch: Watch, every_s: float) -> NoReturn:
    """Redraws on a terminal; elsewhere writes one view below the other."""
    console = Console()
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            shown = _rendered(watch.look(), console)
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            time.sleep(every_s)


def _run(chosen: argparse.Namespace) -> RunReader | None:
    if chosen.run is None and chosen.config is None and chosen.url:
        return None
    place = run_place(chosen)
    run = RunReader(place)
    if chosen.config is None and not run.is_run():
        raise ConfigError(f"--run {place}: no daemon has worked there; it is the run_dir of the run's file")
    return run


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    result = tool_parser(PROGRAM, "Shows what a run does now: whether it learns, who waits for whom, what to do.")
    add_run(result, "the run's folder; not needed with --url")
    result.add_argument(
        "--url", metavar="HOST:PORT", action="append", default=[], type=_address,
        help="where a daemon serves its status, also one of another host (may be repeated)",
    )  # fmt: skip
    result.add_argument(
        "--every", metavar="S", type=_seconds,
        help=f"seconds between two looks (default: {_EVERY_S:g}); with --once: look twice, for rates over that time",
    )  # fmt: skip
    result.add_argument("--once", action="store_true", help="print one view and end")
    result.add_argument("--json", action="store_true", help="with --once: one JSON object, for programs")
    result.add_argument(
        "--web", action="store_true", help="no view of this command: rl-view shows a run in the browser"
    )
    chosen = result.parse_args(arguments)
    if chosen.web:
        result.error("a run in the browser is rl-view --run RUN_DIR")
    if chosen.json and not chosen.once:
        result.error("--json goes with --once")
    return chosen


def _address(text: str) -> str:
    address = text.removeprefix("http://").partition("/")[0]
    try:
        place = urlsplit(f"//{address}")
        if place.hostname and place.port and "@" not in address:
            return address
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected HOST:PORT, such as 127.0.0.1:9100 (got {text!r})")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds, 0.1 to 3600 (got {text!r})")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
