"""`slipstream run`: both daemons of a run in one terminal.

Guarantee: it starts the commands that services run, as a user would start them by hand, and its exit code is theirs. Whatever
they write is shown with the daemon's name before it, and cannot move the cursor. On a terminal, the last line shows how the run
goes; elsewhere, such a line comes twice a minute.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from slipstream.options import Command, config_options, program

if TYPE_CHECKING:
    from rich.console import Console

    from protocol.config.run import RunConfig
    from slipstream.status.reading import View
    from slipstream.status.watch import Watch

_EVERY_S, _SELDOM_S = 1.0, 30.0
_COLOURS = {"trainer": "cyan", "producer": "magenta", "": "bold"}


@click.command(cls=Command)
@config_options
@click.option("--producer-gpus", metavar="N[,N]|cpu", help="as rl-producer --gpu takes them")
@click.option("--trainer-gpus", metavar="N[,N]|cpu", help="as rl-trainer --gpu takes them")
@click.option("--resume", is_flag=True, help="go on from what run_dir holds; start anew if there is nothing")
def run(config: str, overrides: list[str], producer_gpus: str | None, trainer_gpus: str | None, resume: bool) -> int:
    """Start producer and trainer of a run here.

    With two GPUs, each has one; with one GPU, they share it; without any, both run on the CPU. Ctrl-C ends both after a last
    checkpoint. A producer that died is started again. The exit code is the trainer's.
    """
    import asyncio

    from protocol.config.loader import load_config
    from protocol.gpu.nvml import VISIBLE, visible_gpus
    from protocol.runtime import logs
    from slipstream.cluster.plan import start_command

    logs.configure(program())
    loaded = load_config(config, overrides)
    named = "cpu" if producer_gpus == trainer_gpus == "cpu" else None
    count = 0 if named else len(visible_gpus(os.environ.get(VISIBLE)))
    places = Places.of(loaded, count, producer_gpus, trainer_gpus)
    settings = ["--config", config, *(part for override in overrides for part in ("--set", override))]
    if places.are_shared and loaded.pipeline.gpu == "own":
        settings += ["--set", "pipeline.gpu=shared"]
    trainer = [*start_command("rl-trainer", [places.trainer]), *settings, *(["--resume"] if resume else [])]
    producer = [*start_command("rl-producer", [places.producer]), *settings]
    code = asyncio.run(_run(Path(loaded.run_dir), trainer, producer))
    return code if code >= 0 else 128 - code


class Places(NamedTuple):
    """The GPUs of both sides, as `--gpu` takes them."""

    producer: str
    trainer: str

    @classmethod
    def of(cls, config: "RunConfig", count: int, producer: str | None = None, trainer: str | None = None) -> "Places":
        """Choose what is not named.

        Args:
            count: number of GPUs that this process may use.
        """
        numbers = [str(number) for number in range(count)]
        together = config.pipeline.gpu != "own"

        def beside(other: str | None) -> str:
            taken = (other or "").split(",")
            free = [number for number in numbers if together or number not in taken]
            return (other if together and other else None) or next(iter(free or numbers), "cpu")

        if config.engine_server:
            return cls(producer or "cpu", trainer or beside(None))
        first = producer or beside(trainer)
        return cls(first, trainer or beside(first))

    @property
    def are_shared(self) -> bool:
        return self.producer == self.trainer != "cpu"


async def _run(run_dir: Path, trainer: Sequence[str], producer: Sequence[str]) -> int:
    import asyncio

    from rich.console import Console

    from slipstream.pair import Pair
    from slipstream.run_reader import RunReader
    from slipstream.status.watch import Watch

    console = Console(highlight=False, soft_wrap=True)
    with _last_line(console) as (show, update):
        pair, loop = Pair(trainer, producer, show), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, pair.stop)
        progress = asyncio.create_task(_show_progress(Watch(RunReader(run_dir), ()), update, console.is_terminal))
        try:
            return await pair.run()
        finally:
            progress.cancel()


async def _show_progress(watch: "Watch", update: Callable[[str], None], is_terminal: bool) -> None:
    import asyncio

    while True:
        await asyncio.sleep(_EVERY_S if is_terminal else _SELDOM_S)
        with suppress(OSError):  # the run's folder comes and goes with whoever owns it
            update(_progress(await asyncio.to_thread(watch.look)))


def _progress(view: "View") -> str:
    from slipstream.tables import duration, percent

    trainer = view.trainer
    if trainer is None or trainer.step is None:
        return "starting: libraries, model and engine take a minute or so"
    parts = [
        f"step {trainer.step:,}" + (f" of {trainer.max_steps:,}" if trainer.max_steps else ""),
        "" if trainer.reward is None else f"reward {trainer.reward:.3f}",
        "" if trainer.tokens_generated_per_s is None else f"{trainer.tokens_generated_per_s:,.0f} tokens/s",
        "" if trainer.wait_share is None else f"trainer waits {percent(trainer.wait_share)}",
        f"about {duration(trainer.eta_s)} left" if trainer.eta_s else "",
    ]
    return " · ".join(part for part in parts if part)


@contextmanager
def _last_line(console: "Console") -> Iterator[tuple[Callable[[str, str], None], Callable[[str], None]]]:
    """Give two functions: one shows a daemon's line, the other replaces the line below all others."""
    from rich.live import Live
    from rich.text import Text

    from slipstream.tables import printable

    def show(name: str, line: str) -> None:
        text = line.rstrip().rpartition("\r")[2]  # a bar that draws itself anew
        with suppress(OSError):  # a reader that ended, or a full disk, does not end the run
            if text:
                prefix = f"{name or 'slipstream':<10} | "
                console.print(Text.assemble((prefix, _COLOURS[name]), printable(text, keep="\t")))

    if not console.is_terminal:
        yield show, lambda text: show("", text)
        return
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        yield show, lambda text: live.update(Text(text, "bold", no_wrap=True, overflow="ellipsis"), refresh=True)
