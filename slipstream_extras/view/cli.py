"""`slipstream view` serves a run as pages for the browser, on this machine alone.

Guarantee: it writes nothing to the run and opens no browser; it needs neither torch nor vLLM. Ctrl-C and SIGTERM end it.
"""

import os
import sys
from pathlib import Path

import click

from protocol.errors import ConfigError, ExitCode
from protocol.runtime.signals import end_on_signals
from slipstream.options import Command, named_run, run_option
from slipstream.tables import write_line

_NICE = 10  # the daemons of the run come first


@click.command(cls=Command)
@run_option()
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, help="port on 127.0.0.1 (default: 0, any that is free)"
)
@click.option("--compare", metavar="RUN_DIR", type=click.Path(path_type=Path), help="another run, for the page Compare")
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="the run's tokenizer, if it is not where the run had it",
)
def view(port: int, compare: Path | None, tokenizer: Path | None) -> None:
    """Show a run in the browser.

    There are curves, groups, completions and tokens. Nothing is changed.
    """
    from slipstream.run_reader import RunReader
    from slipstream_extras.view.server.app import serve
    from slipstream_extras.view.server.viewer import Viewer

    named = named_run()
    places = {"--run": named.path()} | ({"--compare": compare} if compare else {})
    for option, place in places.items():
        # A run that is about to begin is named by its configuration.
        if not place.exists() or ((option == "--compare" or named.config is None) and not RunReader(place).is_run()):
            raise ConfigError(f"{option} {place}: no daemon has worked there; name the run_dir of the run's file")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {tokenizer}: it has no tokenizer.json; name a folder that has one")
    end_on_signals(ExitCode.OK)
    os.nice(_NICE)
    serve([Viewer(place, tokenizer) for place in places.values()], port, _say_url)


def _say_url(url: str) -> None:
    write_line(f"open {url} in a browser of this machine; Ctrl-C ends it")
    sys.stdout.flush()
