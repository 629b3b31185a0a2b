"""Which run a subcommand means, and its manager."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import NoAnswerError
from slipstream.cluster import session
from slipstream.command import add_run, run_place

if TYPE_CHECKING:
    from slipstream.cluster.fleet.managing import ManagerHandle


def add_place(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the run's folder")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of Ray (default: RAY_ADDRESS, or the one that `up` started)"
    )


def run_dir(chosen: argparse.Namespace) -> Path:
    return Path(os.path.abspath(run_place(chosen)))


@contextlib.contextmanager
def manager_of(chosen: argparse.Namespace) -> "Iterator[ManagerHandle]":
    """`NoAnswerError` if the run is not up, or does not answer."""
    place = run_dir(chosen)
    with session.connected(place, chosen.address):
        from slipstream.cluster.fleet.managing import ManagerHandle, NoAnswer

        manager = ManagerHandle.find()
        if manager is None:
            raise NoAnswerError(f"the run in {place} is not up; start it with rl-cluster up")
        try:
            yield manager
        except NoAnswer as error:
            raise NoAnswerError(
                f"the manager of the run does not answer ({type(error).__name__}); see rl-cluster up"
            ) from error
