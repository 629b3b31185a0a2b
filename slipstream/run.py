"""`slipstream run`: both daemons of a run in one terminal.

Guarantee: it starts the commands that services run, as a user would start them by hand, and its exit code is theirs. Whatever
they write is shown with the daemon's name before it, and cannot move the cursor. On a terminal, the last line shows how the run
goes; elsewhere, such a line comes twice a minute.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import click

from protocol.command_line import gpu_mistakes, show_checked
from protocol.runtime.signals import call_on_signals
from slipstream.options import Command, check_option, config_options, program

if TYPE_CHECKING:
    from slipstream.launch import Launch
    from slipstream.status.watch import Watch


@click.command(cls=Command)
@config_options
@click.option("--producer-gpus", metavar="N[,N]|cpu", help="as rl-producer --gpu takes them")
@click.option("--trainer-gpus", metavar="N[,N]|cpu", help="as rl-trainer --gpu takes them")
@check_option
@click.option("--resume", is_flag=True, help="go on from what run_dir holds; start anew if there is nothing")
def run(
    config: str, overrides: list[str], producer_gpus: str | None, trainer_gpus: str | None, check: bool, resume: bool
) -> int:
    """Start producer and trainer of a run here.

    With two GPUs, each has one; with one GPU, they share it; without any, both run on the CPU. Ctrl-C ends both after a last
    checkpoint. A producer that died is started again. The exit code is the trainer's.
    """
    import asyncio

    from protocol.check.whole import check_file
    from protocol.runtime import logs
    from slipstream.launch import Launch, with_sharing

    logs.configure(program())
    gpus = {"--producer-gpus": producer_gpus, "--trainer-gpus": trainer_gpus}
    checked = check_file(
        config, overrides, lambda _: chain.from_iterable(gpu_mistakes(gpu, flag) for flag, gpu in gpus.items())
    )
    if check:
        chosen = with_sharing(checked.config, producer_gpus, trainer_gpus)
        return show_checked(checked._replace(config=chosen), trainer_gpus)
    launch = Launch.of(config, overrides, producer_gpus=producer_gpus, trainer_gpus=trainer_gpus, resume=resume)
    code = asyncio.run(_run(launch))
    return code if code >= 0 else 128 - code


async def _run(launch: "Launch") -> int:
    import asyncio

    from rich.console import Console

    from slipstream.last_line import last_line, pause_s
    from slipstream.pair import Pair
    from slipstream.run_reader import RunReader
    from slipstream.status.watch import Watch

    console = Console(highlight=False, soft_wrap=True)
    with last_line(console) as (show, update):
        pair = Pair(launch.trainer, launch.producer, show)
        call_on_signals(asyncio.get_running_loop(), lambda number: pair.stop())
        watch = Watch(RunReader(launch.run_dir), ())
        progress = asyncio.create_task(_show_progress(watch, update, pause_s(console)))
        try:
            return await pair.run()
        finally:
            progress.cancel()


async def _show_progress(watch: "Watch", update: Callable[[str], None], every_s: float) -> None:
    import asyncio

    from slipstream.launch import progress

    while True:
        await asyncio.sleep(every_s)
        with suppress(OSError):  # the run's folder may be removed at any time
            update(progress(await asyncio.to_thread(watch.look)))
