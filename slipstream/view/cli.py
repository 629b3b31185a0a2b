"""The `rl-view` command serves a run as pages for the browser, on this machine alone.

Guarantee: it writes nothing to the run and opens no browser; it needs neither torch nor vLLM. Every error is one line on standard
error and ends the process with its own exit code. Ctrl-C and SIGTERM end it.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from protocol.errors import ConfigError, ExitCode
from slipstream.command import add_run, run_place, run_tool, tool_parser, whole
from slipstream.run_reader import RunReader
from slipstream.tables import say

PROGRAM = "rl-view"
_NICE = 10  # the daemons of the run come first


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    return run_tool(PROGRAM, lambda: _serve(chosen), interrupted=ExitCode.OK)  # Ctrl-C is how one ends it


def _serve(chosen: argparse.Namespace) -> ExitCode:
    from slipstream.view.server.app import serve  # --help does without
    from slipstream.view.server.viewer import Viewer

    places = {"--run": run_place(chosen)} | ({"--compare": chosen.compare} if chosen.compare else {})
    for option, place in places.items():
        # A run that is about to begin is named by its configuration.
        if not place.exists() or ((option == "--compare" or chosen.config is None) and not RunReader(place).is_run()):
            raise ConfigError(f"{option} {place}: no daemon has worked there; it is the run_dir of the run's file")
    if chosen.tokenizer is not None and not (chosen.tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {chosen.tokenizer}: it has no tokenizer.json; name a folder that has one")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.nice(_NICE)
    serve([Viewer(place, chosen.tokenizer) for place in places.values()], chosen.port, _say_url)
    return ExitCode.OK


def _say_url(url: str) -> None:
    say(f"open {url} in a browser of this machine; Ctrl-C ends it")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    result = tool_parser(
        PROGRAM, "Shows a run in the browser: curves, groups, completions, tokens. It changes nothing."
    )
    add_run(result, "the run's folder, or its journal file")
    result.add_argument(
        "--port", metavar="N", type=_port, default=0, help="port on 127.0.0.1 (default: 0, any that is free)"
    )
    result.add_argument("--compare", metavar="RUN_DIR", type=Path, help="another run, for the page Compare")
    result.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="the run's tokenizer, if it is not where the run had it"
    )
    return result


def _port(text: str) -> int:
    return whole(text, most=65_535)


if __name__ == "__main__":
    sys.exit(main())
