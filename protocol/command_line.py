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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from protocol import __version__
from protocol.errors import ConfigError, ExitCode, SlipstreamError, is_out_of_memory
from protocol.gpu.nvml import select_gpus
from protocol.library_errors import library_of, reason_of
from protocol.runtime import logs
from protocol.runtime.files import out_of_space

if TYPE_CHECKING:
    from protocol.config.run import RunConfig

logger = logging.getLogger(__name__)


def parser(program: str, description: str, *, connects: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the flags that both daemons have.

    Args:
        connects: whether the configuration may also come from the trainer.
    """
    result = argparse.ArgumentParser(prog=program, description=description)
    add_config(result, connects=connects)
    result.add_argument(
        "--check",
        nargs="?",
        const="quick",
        choices=("quick", "full"),
        help="validate, print the resolved file and exit; `full` also asks vLLM, PEFT or TRL what only they can judge",
    )
    result.add_argument(
        "--gpu",
        metavar="N[,N]|cpu",
        default="0",
        help="GPU index as nvidia-smi counts, or among those of CUDA_VISIBLE_DEVICES where that is set; a UUID or the name of an "
        "instance of MIG; or cpu (default: %(default)s)",
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
    check_libraries: "Callable[[RunConfig], None]",
    run: "Callable[[RunConfig, list[int]], ExitCode]",
    load: "Callable[[argparse.Namespace], AbstractContextManager[RunConfig]] | None" = None,
    needs_gpu: "Callable[[RunConfig], bool]" = lambda config: True,
) -> int:
    """Load the configuration, then checks or runs, and turns errors into exit codes. `check_libraries` imports the libraries
    that own sections; `run` is the daemon and gets the GPU indexes, none for CPU. Both work in the configuration's
    `folder`. What `load` gives is used in its context; without it the configuration is a file. Where it `needs_gpu` none, --gpu
    is not looked at."""
    from protocol.config.loader import dump_config, load_config  # its import takes as long as all others
    from protocol.config.places import working_in
    from protocol.gpu.cards import memory_table
    from protocol.gpu.memory import preview

    def work() -> int:
        loaded = load(arguments) if load else nullcontext(load_config(arguments.config, arguments.overrides))
        with loaded as config, working_in(config.folder):
            if arguments.check:
                if arguments.check == "full":
                    check_libraries(config)
                num_ranks = getattr(arguments, "num_ranks", 1)  # of a trainer
                notes = chain(memory_table(config, arguments.gpu, num_ranks), preview(config, arguments.gpu))
                shown = dump_config(config) + "".join(f"# {line}\n" for line in notes)
                return written(lambda: _show(shown))
            logs.configure(program, config.observability.log_level, config.observability.log_format)
            return run(config, select_gpus(arguments.gpu if needs_gpu(config) else "cpu"))

    logs.configure(program)
    return exit_code(program, work)


def exit_code(program: str, work: Callable[[], int]) -> int:
    """Return the result of `work`, or the code of the error that ended it, after reporting the error. Characters that standard
    output cannot show are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
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


def _show(text: str) -> ExitCode:
    print(text, end="")
    return ExitCode.OK


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
