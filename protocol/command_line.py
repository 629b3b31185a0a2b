"""The common part of the command lines: flags, error reports, exit codes, the choice of GPUs.

Guarantee: `--help` and `--check` import no heavy library. A `SlipstreamError` ends the process with its own exit code and a
message on standard error without a traceback; every other exception ends it with a traceback and `ExitCode.BUG`. Only one of
Slipstream's own code is called a bug. Where logs are JSON, the message is JSON too.
"""

import argparse
import atexit
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, NoReturn

from protocol import __version__
from protocol.errors import ConfigError, DeviceError, ExitCode, SlipstreamError, is_out_of_memory
from protocol.gpu.nvml import choose_gpus, select_gpus
from protocol.library_errors import library_of, reason_of
from protocol.runtime import logs
from protocol.runtime.files import out_of_space
from protocol.runtime.user import settle_user

if TYPE_CHECKING:
    from protocol.check.whole import Checked
    from protocol.config.mistakes import Mistake
    from protocol.config.run import RunConfig

logger = logging.getLogger(__name__)


CHECK = "look at the file and all that it names here, print the resolved file or every mistake, and exit"
"""The help of `--check`."""


def parser(program: str, description: str, *, connects: bool = False, gpu: str = "0") -> argparse.ArgumentParser:
    """Return a parser with the flags that both daemons have.

    Args:
        connects: whether the configuration may also come from the trainer.
        gpu: the default of `--gpu`, in words.
    """
    result = argparse.ArgumentParser(prog=program, description=description)
    add_config(result, connects=connects)
    result.add_argument("--check", action="store_true", help=CHECK)
    result.add_argument(
        "--gpu",
        metavar="N[,N]|cpu",
        help="GPU index as nvidia-smi counts, or among those of CUDA_VISIBLE_DEVICES where that is set; a UUID or the name of an "
        f"instance of MIG; or cpu (default: {gpu})",
    )
    result.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return result


def add_config(parser: argparse.ArgumentParser, *, connects: bool = False) -> None:
    place = parser.add_mutually_exclusive_group(required=True) if connects else parser
    place.add_argument(
        "--config", metavar="FILE", required=not connects, help="the run's YAML file (both daemons read the same)"
    )
    if connects:
        place.add_argument(
            "--connect",
            metavar="tcp://HOST:PORT|ipc://PATH",
            help="the trainer's transport.endpoint: configuration and the run's own Python files come from there",
        )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one value, e.g. --set pipeline.max_staleness=2 (may be repeated)",
    )


def main(
    arguments: argparse.Namespace,
    program: str,
    run: "Callable[[RunConfig, list[int]], ExitCode]",
    load: "Callable[[argparse.Namespace], AbstractContextManager[RunConfig]] | None" = None,
    prepare: "Callable[[RunConfig], None]" = lambda config: None,
    needs_gpu: "Callable[[RunConfig], bool]" = lambda config: True,
) -> int:
    """Load the configuration, then check or run, and turn errors into exit codes. `run` is the daemon and gets the GPU indexes,
    none for CPU. It works in the configuration's `folder`. What `load` gives is used in its context; without it the configuration
    is a file. `prepare` completes the arguments, or raises `ConfigError`. Where it `needs_gpu` none, --gpu is not looked at."""
    from protocol.check.whole import Checked, check_file, check_library_sections  # as long as all other imports
    from protocol.config.mistakes import Mistake
    from protocol.config.places import working_in
    from protocol.wire.model_source import look_at_model

    asked = arguments.gpu

    def more(config: "RunConfig") -> "Iterator[Mistake]":
        try:
            prepare(config)
        except ConfigError as error:
            yield Mistake((), str(error), names_key=True)
        yield from gpu_mistakes(asked) if needs_gpu(config) else ()

    def work() -> int:
        if arguments.check and load is None:
            checked = check_file(arguments.config, arguments.overrides, more)
            return show_checked(checked, arguments.gpu, getattr(arguments, "num_ranks", 1))
        loaded = load(arguments) if load else nullcontext(check_library_sections(arguments.config, arguments.overrides))
        with loaded as config, working_in(config.folder):
            prepare(config)
            if arguments.check:
                return show_checked(
                    Checked(config, ["files: they are the trainer's, and its host has them"]), arguments.gpu
                )
            logs.configure(program, config.observability.log_level, config.observability.log_format)
            look_at_model(config.model)
            return run(config, select_gpus(_or_first(arguments.gpu) if needs_gpu(config) else "cpu"))

    logs.configure(program)
    return exit_code(program, work)


def gpu_mistakes(asked: str | None, flag: str = "--gpu") -> "Iterator[Mistake]":
    """Yield what is wrong with the GPUs that a command line names; nothing where it names none."""
    from protocol.config.mistakes import Mistake

    try:
        if asked is not None and asked != "cpu":
            choose_gpus(asked, flag)
    except DeviceError as error:
        yield Mistake((), str(error), DeviceError)


def _or_first(gpu: str | None) -> str:
    return "0" if gpu is None else gpu


def show_checked(checked: "Checked", gpu: str | None, num_ranks: int = 1) -> int:
    """Print a checked configuration with its estimates of memory, and what was not looked at."""
    from protocol.config.loader import dump_config
    from protocol.gpu.cards import memory_table
    from protocol.gpu.memory import preview

    config, gpu = checked.config, _or_first(gpu)
    notes = [*memory_table(config, gpu, num_ranks), *preview(config, gpu)]
    if config.journal_file.exists() or any(config.checkpoints_dir.glob("checkpoint-*")):
        notes.append(f"run_dir: {config.run_dir} holds a run; --resume goes on with it")
    notes += ["not looked at:", *(f"  {line}" for line in checked.not_looked_at)]
    text = dump_config(config) + "".join(f"# {line}\n" for line in notes)

    def show() -> ExitCode:
        print(text, end="")
        return ExitCode.OK

    return written(show)


def exit_code(program: str, work: Callable[[], int]) -> int:
    """Return the result of `work`, or the code of the error that ended it, after reporting the error. Characters that standard
    output cannot show are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        settle_user()
        return work()
    except SlipstreamError as error:
        return _report_end(program, f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        if is_out_of_memory(error):
            fix = "free the device of other processes (nvidia-smi shows them), or take one with more memory"
            return _report_end(program, f"error: {str(error).partition(chr(10))[0]}; {fix}", ExitCode.DEVICE)
        why = "this is a bug; please report it with its traceback"
        if (library := library_of(error)) is not None:
            why = f"error: {library} failed where nothing of the kind was expected; its traceback is above: {reason_of(error)}"
        return _report_end(program, why, ExitCode.BUG, bug=True)


def written(work: Callable[[], int]) -> int:
    """Run `work`, flush standard output, and return its result. A reader that ends early, such as `head`, is no
    error. `ConfigError` where the system refuses a file, or the disk that standard output goes to is full."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _write_no_more()
        return ExitCode.OK
    except OSError as error:
        if error.filename is not None:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        if out_of_space(error):
            _write_no_more()
            raise ConfigError(f"standard output: {error.strerror}") from error
        raise


def print_progress(line: str) -> None:
    """Write a line at once. A missing reader or a full disk of a log does not end work of hours."""
    with suppress(OSError):
        print(line, flush=True)


def _write_no_more() -> None:
    """Discard the rest of the output, which would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but for the interpreter's own end: that looks at each of the millions of objects of
    torch, TRL or vLLM several times, which takes a second or two of computing, to free what the kernel frees at once. Threads
    that are to be waited for, and whatever is registered to run at the exit, have their turn; what was written is flushed."""
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what `multiprocessing` ends its processes with
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def _report_end(program: str, why: str, code: ExitCode, *, bug: bool = False) -> ExitCode:
    if logs.structured():
        fields = {"exit_code": int(code), "exit_name": code.name}
        logger.critical("%s", why, exc_info=bug, extra={"fields": fields})
    else:
        if bug:
            traceback.print_exc()
            logs.note(traceback.format_exc())
        print(f"{program}: {why}", file=sys.stderr, flush=True)
        logs.note(f"{why} (exit code {code.name})")
    return code
