"""`slipstream cluster up`: places a run and watches it, or finds one that runs and goes on with it.

Guarantee: nothing is started before everything was found to have a place, and what is missing is said within a minute. The run
goes on without this process: Ctrl-C leaves it running.
"""

import os
from pathlib import Path

from protocol.config.loader import load_config
from protocol.errors import ExitCode
from slipstream.cluster import session
from slipstream.cluster.asked import Asked, check_gpu_use
from slipstream.tables import say


def up(asked: Asked) -> ExitCode:
    config = load_config(asked.config, asked.overrides)
    check_gpu_use(config, asked.gpus)
    run_dir = Path(os.path.abspath(config.run_dir))
    session.require_ray()
    starts_ray = session.find_address(run_dir, asked.address) is None
    if starts_ray:
        producers = max(asked.producers or 1, config.producers.max if config.producers else 1)
        session.start_here(run_dir, max(os.cpu_count() or 1, asked.cpus * (asked.ranks + producers)))
    with session.connected(run_dir, asked.address) as ray:
        from slipstream.cluster.down import take_down
        from slipstream.cluster.placing import placed
        from slipstream.cluster.watching import Watch

        try:
            watch = Watch(placed(asked, config, run_dir))
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
    say(f"the run goes on: slipstream cluster status --run {run_dir}; slipstream cluster down --run {run_dir} ends it")
    return ExitCode.OK
