"""The `rl-status` command: what a run does now, in a terminal or as JSON.

Guarantee: it only reads, imports no heavy library, and goes on whichever daemons answer. Every error is one line on standard
error and ends the process with its own exit code; with `--once`, `ExitCode.NO_ANSWER` says that no daemon answers.
"""

import argparse
import dataclasses
import io
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live

from protocol import __version__
from protocol.errors import ConfigError, ExitCode
from tools.command import ToolParser, run_tool
from tools.status.history import rewards_of_steps
from tools.status.picture import PICTURE_WIDTH, save_picture
from tools.status.reading import read
from tools.status.render import render
from tools.status.scrape import Answer, look
from tools.status.sources import find_sources
from tools.status.view import View
from tools.status.warnings import warnings

PROGRAM = "rl-status"
WINDOW_S = 60.0
_EVERY_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    chosen = _parsed(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return run_tool(PROGRAM, lambda: _show(chosen), interrupted=ExitCode.OK)  # the way to leave a live view


def _show(chosen: argparse.Namespace) -> ExitCode:
    watch = _Watch(_run_dir(chosen), chosen.url)
    return _once(watch, chosen) if chosen.once else _forever(watch, chosen.every or _EVERY_S)


class _Watch:
    """Looks again and again, and remembers as much as the rates and the reward's line need."""

    def __init__(self, run_dir: Path | None, addresses: list[str]) -> None:
        self._run_dir = run_dir
        self._addresses = addresses
        self._looks: deque[tuple[float, list[Answer]]] = deque()
        self._seen: dict[int, float] = {}

    def look(self) -> View:
        now = time.monotonic()
        self._looks.append((now, look(find_sources(self._run_dir, self._addresses))))
        while now - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()
        shown = read([answers for _, answers in self._looks], {})
        return dataclasses.replace(shown, at=shown.at or time.time(), rewards=self._rewards(shown))

    def _rewards(self, shown: View) -> dict[int, float]:
        """Of the file; or, where there is none, those that came by."""
        trainer = shown.trainer
        if trainer is not None and trainer.step and trainer.reward is not None:
            self._seen = {step: reward for step, reward in self._seen.items() if step < trainer.step}
            self._seen[trainer.step] = trainer.reward
        return rewards_of_steps(self._run_dir) or dict(self._seen)


def _once(watch: _Watch, chosen: argparse.Namespace) -> ExitCode:
    shown = watch.look()
    if chosen.every:
        time.sleep(chosen.every)
        shown = watch.look()
    if chosen.json:
        sys.stdout.write(json.dumps(_as_json(shown), allow_nan=False, indent=1) + "\n")
    elif chosen.svg:
        save_picture(render(shown, warnings(shown), PICTURE_WIDTH), chosen.svg)
    else:
        _print(Console(), shown)
    return ExitCode.OK if shown.answers else ExitCode.NO_ANSWER


def _as_json(shown: View) -> dict[str, Any]:
    rewards = [{"step": step, "reward": reward} for step, reward in shown.rewards.items()]
    found = [warning._asdict() for warning in warnings(shown)]
    return dataclasses.asdict(shown) | {"answers": shown.answers, "rewards": rewards, "warnings": found}


def _print(console: Console, shown: View) -> None:
    console.print(render(shown, warnings(shown), console.width))


def _forever(watch: _Watch, every_s: float) -> NoReturn:
    """Redraws on a terminal; elsewhere writes one view below the other."""
    console = Console()
    if not console.is_terminal:
        while True:
            _print(console, watch.look())
            time.sleep(every_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = watch.look()
            live.update(render(shown, warnings(shown), console.width), refresh=True)
            time.sleep(every_s)


def _run_dir(chosen: argparse.Namespace) -> Path | None:
    if chosen.config is not None:
        from protocol.config.loader import load_config  # as long to import as everything else

        return Path(load_config(chosen.config).run_dir)
    if chosen.run is None and chosen.url:
        return None
    run_dir = Path(chosen.run or ".")
    if not (run_dir / "metrics").is_dir():
        raise ConfigError(f"--run {run_dir}: no daemon has worked there; it is the run_dir of the run's file")
    return run_dir


def _parser() -> argparse.ArgumentParser:
    result = ToolParser(
        prog=PROGRAM, description="Shows what a run does now: whether it learns, who waits for whom, what to do."
    )
    place = result.add_mutually_exclusive_group()
    place.add_argument(
        "--run", metavar="RUN_DIR", help="the run's folder (default: this folder, unless --url is given)"
    )
    place.add_argument("--config", metavar="FILE", help="the run's YAML file, instead of --run")
    result.add_argument(
        "--url", metavar="HOST:PORT", action="append", default=[], type=_address,
        help="where a daemon serves its metrics, also one of another host (may be repeated)",
    )  # fmt: skip
    result.add_argument(
        "--every", metavar="S", type=_seconds,
        help=f"seconds between two looks (default: {_EVERY_S:g}); with --once: look twice, for rates over that time",
    )  # fmt: skip
    result.add_argument("--once", action="store_true", help="print one view and end")
    form = result.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="with --once: one JSON object, for programs")
    form.add_argument("--svg", metavar="FILE", type=Path, help="with --once: the view as a picture")
    result.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return result


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if not chosen.once and (chosen.json or chosen.svg):
        parser.error("--json and --svg go with --once")
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
