"""`slipstream cluster up` places a run and watches it, or goes on with one that runs.

Guarantee: nothing is started before everything was found to have a place, and a missing resource is reported within a minute. The
run goes on without this process: Ctrl-C leaves it running.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.config.loader import load_config
from protocol.errors import ConfigError, ExitCode, NoAnswerError, NoResourcesError, SlipstreamError
from protocol.runtime.signals import StopFlag
from slipstream.tables import printable, write_line
from slipstream_extras.ray import session
from slipstream_extras.ray.asked import Asked, check_gpu_use
from slipstream_extras.ray.plan import TRAINER, DaemonReport, FleetReport

if TYPE_CHECKING:  # it imports Ray, which reads its environment when it is imported; `session.connected` sets that
    from slipstream_extras.ray.manager import ManagerHandle

_PLACED_S = 60.0
_SILENCE_S = 60.0
_LOOK_EVERY_S = 0.5


class Watch:
    def __init__(self, manager: "ManagerHandle", sleep: Callable[[float], object]) -> None:
        self._manager = manager
        self._sleep = sleep
        self._seen = 0
        self._why = ""  # the manager did not answer
        self._heard = time.monotonic()

    def wait_until_it_runs(self) -> None:
        """Wait until every daemon was started, or raise `NoResourcesError` if one has no place within a minute."""
        until = time.monotonic() + _PLACED_S
        while True:
            report = self._look()
            if report is None and self._is_gone():
                raise ConfigError(f"the manager of the run cannot start: {self._why}")
            if report is not None and _all_begun(report):
                return
            if report is not None and report.trainer is not None and report.trainer.is_over:
                return  # `wait_until_it_ends` says why
            if time.monotonic() > until:
                silent = "; ".join(report.unreachable) if report else "the manager has no place"
                raise NoResourcesError(
                    f"not everything runs after {_PLACED_S:g} s: {(report and report.missing) or silent}. What runs goes on; "
                    "slipstream cluster down ends it"
                )
            self._sleep(_LOOK_EVERY_S)

    def wait_until_it_ends(self) -> ExitCode:
        """Wait until the trainer has ended for good, or the run was taken down; return the trainer's exit code."""
        while True:
            report = self._look()
            if report is None and self._is_gone():
                write_line("the run was taken down")
                return ExitCode.OK
            trainer = report.trainer if report else None
            if trainer is not None and trainer.is_over and trainer.exit_code is not None:
                self._look()
                return _code(trainer)
            self._sleep(_LOOK_EVERY_S)

    def _is_gone(self) -> bool:
        from slipstream_extras.ray.manager import ManagerHandle

        return ManagerHandle.find() is None

    def _look(self) -> FleetReport | None:
        """Show what is new; None if the manager does not answer now."""
        from slipstream_extras.ray.manager import NoAnswer, last_line

        try:
            self._seen, lines = self._manager.events(self._seen)
            report = self._manager.report()
        except NoAnswer as error:
            self._why = last_line(error)
            if time.monotonic() - self._heard > _SILENCE_S:
                raise NoAnswerError(
                    f"the manager of the run has not answered for {_SILENCE_S:g} s ({type(error).__name__}): its node or Ray is "
                    "gone. Give the same slipstream cluster up again: it finds what runs, and starts what does not"
                ) from error
            return None
        self._heard = time.monotonic()
        for line in lines:
            write_line(printable(line))
        return report


def _all_begun(report: FleetReport) -> bool:
    begun = {daemon.name for daemon in report.daemons if daemon.phase != "new"}
    return TRAINER in begun and len(begun) >= 1 + report.wanted


def _code(trainer: DaemonReport) -> ExitCode:
    try:
        return ExitCode(trainer.exit_code or 0)
    except ValueError:
        raise SlipstreamError(f"the trainer ended with {trainer.exit_code}: {trainer.message}") from None


def up(asked: Asked) -> ExitCode:
    config = load_config(asked.config, asked.overrides)
    check_gpu_use(config, asked.gpus)
    run_dir = Path(os.path.abspath(config.run_dir))
    session.require_ray()
    stop = StopFlag()
    starts_ray = session.find_address(run_dir, asked.address) is None
    if starts_ray:
        producers = max(asked.producers or 1, config.producers.max if config.producers else 1)
        session.start_here(run_dir, max(os.cpu_count() or 1, asked.cpus * (asked.ranks + producers)), stop.sleep)
    with session.connected(run_dir, asked.address) as ray:
        from slipstream_extras.ray.down import take_down
        from slipstream_extras.ray.placing import placed

        try:
            watch = Watch(placed(asked, config, run_dir, stop.sleep), stop.sleep)
            watch.wait_until_it_runs()
        except BaseException:
            if starts_ray:
                take_down(run_dir, ray)
            raise
        if asked.detach:
            return _leave(run_dir)
        try:
            code = watch.wait_until_it_ends()
        except KeyboardInterrupt:
            return _leave(run_dir)
        take_down(run_dir, ray)
        return code


def _leave(run_dir: Path) -> ExitCode:
    write_line(
        f"the run goes on: slipstream cluster status --run {run_dir}; slipstream cluster down --run {run_dir} ends it"
    )
    return ExitCode.OK
