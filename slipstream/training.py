"""A run from Python: `load_config` and `train`.

Guarantee: a run has the same two daemons, commands and files as one of `slipstream run`. None of them outlives the call, or this
process. No signal handler is installed, and the thread that calls may run an event loop, as a notebook's does.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from protocol.errors import ExitCode, SlipstreamError
from slipstream.run_data import Run

if TYPE_CHECKING:
    from protocol.config.run import RunConfig
    from slipstream.launch import Launch
    from slipstream.pair import Pair
    from slipstream.reward_files import Reward

Config: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | RunConfig"

_KEPT_LINES = 12


class RunFailedError(SlipstreamError):
    """A daemon of the run ended with an error. `exit_code` is its own."""

    def __init__(self, code: int, run_dir: Path, lines: Mapping[str, Sequence[str]]) -> None:
        self.exit_code = ExitCode(code) if code in ExitCode.__members__.values() else ExitCode.BUG
        meaning = self.exit_code.meaning if self.exit_code == code else "it was killed"
        shown = [f"{name:<8} | {line}" for name, last in lines.items() for line in last]
        super().__init__(
            "\n".join([f"the run in {run_dir} ended with exit code {code}: {meaning}; its logs are there", *shown])
        )


def load_config(config: Config, overrides: Sequence[str] = ()) -> "RunConfig":
    """Read and check the configuration of a run.

    Args:
        config: a YAML file, or its content as a dictionary, whose relative paths begin in the working directory.
        overrides: as `--set` takes them, such as `trainer.max_steps=20`.

    Raises:
        ConfigError: the configuration is refused; the message names key, value and fix.
    """
    from protocol.config import loader

    if isinstance(config, str | os.PathLike):
        return loader.load_config(os.fspath(config), list(overrides))
    values = config if isinstance(config, Mapping) else config.model_dump(mode="json")
    return loader.load_values(values, list(overrides))


def train(
    config: Config,
    rewards: "Sequence[Reward]" = (),
    *,
    producer_gpus: str | None = None,
    trainer_gpus: str | None = None,
    resume: bool = False,
) -> Run:
    """Train to the end, and return the run. An interrupt ends both daemons after a last checkpoint; another one kills them.

    Args:
        config: as `load_config` takes it, or what that returns.
        rewards: functions, `file.py:name` or names of plugins, in place of `rewards.functions`.
        producer_gpus: as `rl-producer --gpu` takes them (default: what this machine has).
        trainer_gpus: likewise.
        resume: go on from what the run's folder holds.

    Raises:
        ConfigError: the configuration or a reward is refused; nothing was started.
        RunFailedError: a daemon failed; the message has its last lines.
        KeyboardInterrupt: it was interrupted, and both daemons have ended.
    """
    import json

    from protocol.config.loader import dump_config
    from protocol.runtime.scratch import scratch_folder
    from slipstream.launch import Launch
    from slipstream.reward_files import place_of

    loaded = load_config(config)
    if rewards:
        folder = Path(loaded.run_dir) / "rewards"
        functions = [{"function": place_of(reward, folder, Path(loaded.folder))} for reward in rewards]
        loaded = load_config(loaded, [f"rewards.functions={json.dumps(functions)}"])
    with scratch_folder() as scratch:
        file = scratch / "run.yaml"
        file.write_text(dump_config(loaded), encoding="utf-8")
        _follow(Launch.of(str(file), producer_gpus=producer_gpus, trainer_gpus=trainer_gpus, resume=resume))
    return Run(loaded.run_dir)


def _follow(launch: "Launch") -> None:
    """Run both daemons to their end, and show how far they are."""
    from rich.console import Console

    from slipstream.last_line import last_line, pause_s
    from slipstream.launch import progress
    from slipstream.pair import PRODUCER, TRAINER, Pair
    from slipstream.run_reader import RunReader
    from slipstream.status.watch import Watch

    reader = RunReader(launch.run_dir)
    lines = {name: deque[str](maxlen=_KEPT_LINES) for name in (TRAINER, PRODUCER)}
    console, watch = Console(highlight=False, soft_wrap=True), Watch(reader, ())
    is_interrupted = False
    with last_line(console) as (show, update):

        def keep(name: str, line: str) -> None:
            if name in lines:
                lines[name].append(line.rstrip())
            else:
                show(name, line)

        with _beside(Pair(launch.trainer, launch.producer, keep)) as (wait, stop):
            while True:
                try:
                    if (code := wait(pause_s(console))) is not None:
                        break
                    with suppress(OSError):  # the run's folder may be removed at any time
                        update(progress(watch.look()))
                except KeyboardInterrupt:
                    is_interrupted = True
                    stop()
        if code == ExitCode.OK and (ended := reader.ended()):
            update(ended.text)
    if is_interrupted:
        raise KeyboardInterrupt
    if code != ExitCode.OK:
        raise RunFailedError(code, launch.run_dir, lines)


@contextmanager
def _beside(pair: "Pair") -> "Iterator[tuple[Callable[[float], int | None], Callable[[], object]]]":
    """Run a pair on a thread with a loop of its own. Give two functions: one waits at most that long for the exit code, the
    other asks the pair to stop."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor
    from concurrent.futures import TimeoutError as TooEarlyError

    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1, "slipstream-pair") as thread:
        ending = thread.submit(loop.run_until_complete, pair.run())

        def wait(seconds: float) -> int | None:
            try:
                return ending.result(seconds)
            except TooEarlyError:
                return None

        try:
            yield wait, lambda: loop.call_soon_threadsafe(pair.stop)
        finally:
            if not ending.done() and not pair.is_stopping:
                loop.call_soon_threadsafe(pair.stop)
    loop.close()
