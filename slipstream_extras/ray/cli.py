"""The subcommands of `slipstream cluster`, which place a run on many machines under Ray.

Guarantee: `--help` imports no heavy library. `status` and `logs` only read, and control characters in what they show do nothing.
`scale` is refused, with what is missing, if the nodes have no room; the producers that go are drained.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import ConfigError, ExitCode, NoAnswerError, NoResourcesError
from slipstream.options import Function, Group, json_option, named_run, run_option, set_option
from slipstream.tables import printable, write_line
from slipstream_extras.ray import MOST_PRODUCERS

if TYPE_CHECKING:
    from slipstream_extras.ray.manager import ManagerHandle

_ADDRESS = "slipstream.ray"


def _remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_ADDRESS] = value


def _placed(function: Function) -> Function:
    """Add the options that name a run that is up."""
    text = "of Ray (default: RAY_ADDRESS, or the one that `up` started)"
    function = click.option("--address", metavar="HOST:PORT", expose_value=False, callback=_remember, help=text)(
        function
    )
    return run_option("the run's folder")(function)


def _run_dir() -> Path:
    return Path(os.path.abspath(named_run().path()))


def _address() -> str | None:
    return click.get_current_context().meta.get(_ADDRESS)


@contextlib.contextmanager
def _manager() -> "Iterator[ManagerHandle]":
    """`NoAnswerError` if the run is not up, or does not answer."""
    from slipstream_extras.ray import session

    place = _run_dir()
    with session.connected(place, _address()):
        from slipstream_extras.ray.manager import ManagerHandle, NoAnswer

        manager = ManagerHandle.find()
        if manager is None:
            raise NoAnswerError(f"the run in {place} is not up; start it with slipstream cluster up")
        try:
            yield manager
        except NoAnswer as error:
            raise NoAnswerError(
                f"the manager of the run does not answer ({type(error).__name__}); see slipstream cluster up"
            ) from error


@click.group(cls=Group)
@_placed
def cluster() -> None:
    """Run trainer and producers on many machines."""


def _size(flag: str, least: int, most: int, text: str) -> Callable[[Function], Function]:
    return click.option(flag, type=click.IntRange(least, most), default=1, show_default=True, help=text)


@cluster.command()
@set_option
@click.option("--config", metavar="FILE", required=True, help="the run's YAML file")
@click.option("--address", metavar="HOST:PORT", help="of Ray (default: RAY_ADDRESS, or a Ray of this machine alone)")
@click.option("--producers", type=click.IntRange(1, MOST_PRODUCERS), help="(default: producers.min, or 1)")
@_size("--ranks", 1, 1024, "of the trainer, each on a GPU of one node")
@_size("--gpus", 0, 1024, "of each producer; 0: it and the trainer compute on the CPU")
@_size("--cpus", 1, 4096, "CPUs that each producer and rank reserves, and threads that it takes")
@click.option("--model", metavar="FOLDER", help="the base model on the producers' nodes, where it is elsewhere there")
@click.option(
    "--producer-set",
    "producer_overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="override one value on the producers' nodes, such as a place that is another one there (may be repeated)",
)
@click.option("--trainer-node", metavar="HOST", help="address of the node that has run_dir (default: this one)")
@click.option(
    "--backup",
    metavar="FOLDER",
    default="",
    help="keep two copies of the run there, made every ten minutes and at the end, on a network disk for example",
)
@click.option("--detach", is_flag=True, help="end when everything runs, without watching")
def up(**options: Any) -> ExitCode:
    """Start a run under Ray, or go on with one, and watch it."""
    from slipstream_extras.ray.up import Asked, up

    return up(Asked(**options))


@cluster.command()
@_placed
@json_option
def status(as_json: bool) -> None:
    """Show what runs where, and how the run goes."""
    from slipstream_extras.ray.status import show

    with _manager() as manager:
        report = manager.report()
    show(report, as_json=as_json)


@cluster.command()
@_placed
@click.argument("name", required=False)
@click.option("--lines", type=click.IntRange(1, 10_000), default=100, show_default=True, help="the last N lines")
def logs(name: str | None, lines: int) -> None:
    """Show the last lines of a daemon.

    NAME is as `status` shows it: trainer, producer-1, ... Without it: the manager, which logs what was started and why.
    """
    with _manager() as manager:
        if name is None:
            found: list[str] | None = manager.last_lines(lines)
        else:
            from slipstream_extras.ray.actors import Actors

            found = Actors().last_lines(name, lines)
    if found is None:
        raise NoAnswerError(f"{name} does not run or does not answer; slipstream cluster status has the names")
    for line in found:
        write_line(printable(line, keep="\t"))


@cluster.command()
@_placed
@click.option("--producers", "wanted", type=click.IntRange(1, MOST_PRODUCERS), required=True, help="in all")
def scale(wanted: int) -> None:
    """Change the number of producers, while the run goes on."""
    with _manager() as manager:
        from slipstream_extras.ray.actors import free_per_node
        from slipstream_extras.ray.plan import Need, missing_text, without_place

        report = manager.report()
        plan = report.plan
        if plan.most and not plan.least <= wanted <= plan.most:
            raise ConfigError(
                f"--producers {wanted}: the run has producers.min={plan.least} and producers.max={plan.most}"
            )
        more = [Need("a producer", plan.producer_needs)] * max(0, wanted - report.wanted)
        free = free_per_node()
        if homeless := without_place(more, free):
            raise NoResourcesError(
                f"no room for {wanted} producers, so nothing was changed: {missing_text(homeless, free)}"
            )
        manager.scale(wanted)
    write_line(f"producers: {report.wanted} -> {wanted}")


@cluster.command()
@_placed
@click.option(
    "--deadline",
    metavar="S",
    type=click.IntRange(1, 86_400),
    default=300,
    show_default=True,
    help="seconds until producers that have not ended are killed, and as many more for the trainer",
)
def down(deadline: int) -> None:
    """Drain and end a run."""
    from slipstream_extras.ray import session
    from slipstream_extras.ray.down import take_down

    place = _run_dir()
    with session.connected(place, _address()) as ray:
        take_down(place, ray, deadline)
