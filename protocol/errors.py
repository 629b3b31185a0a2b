"""Errors that a user can act on, and the exit code each of them ends the process with.

Guarantee: a daemon that stops on purpose stops with one of these codes, and the message names the problem, its place and the fix.
Every other exception is a bug and ends the process with `ExitCode.BUG`.
"""

import errno
import sys
from enum import IntEnum

import msgspec


class ExitCode(IntEnum):
    """Process exit codes and what they mean, documented in docs/operations.md. Values follow sysexits.h where it has a name."""

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    OK = 0, "it ended as it should"
    USAGE = 2, "unknown flag"
    DATASET = 65, "dataset missing, empty, or without the named column"
    DATA_FAILURES = 66, "a reward scored nothing, or too large a share of prompts failed: prompts too long, ..."
    NO_SIGNAL = 67, "no group had rewards that differ: there is nothing to learn from"
    NO_ANSWER = (
        68,
        "no daemon (slipstream status --once), trainer (rl-producer --connect) or Ray (slipstream cluster) answers",
    )
    ENGINE = 69, "the generation engine died or cannot serve what was asked"
    BUG = 70, "an unexpected exception; the traceback is printed"
    DEVICE = 71, "a GPU index that does not exist, or a GPU has too little memory"
    NOT_FINITE = 72, "loss or gradient was NaN or infinite; the step was not taken, its batch is in RUN_DIR/inspect"
    ENDPOINT_IN_USE = 73, "another process is bound to the endpoint"
    JOURNAL = 74, "the journal cannot be written or read, or is damaged; what was acknowledged is in it"
    STALLED = 75, "no progress within pipeline.stall_timeout_s"
    INCOMPATIBLE_PEER = 76, "the handshake refused: other model, schema, dtype, ..."
    RANK_LOST = 77, "one of several trainer ranks ended, stood still or computed something else; --resume goes on"
    CONFIG = 78, "configuration refused, by us or by the library that owns the section"
    NO_RESOURCES = 79, "slipstream cluster: the nodes have no room for the run; the message says what is missing"
    BUNDLE = 80, "rl-producer --connect: the trainer has no bundle to give, or it cannot be used on this host"
    POLICY_REFUSED = (
        81,
        "no producer serves the trainer's policies, or this one never served any; the message has the reason",
    )
    INTERRUPTED = 130, "a second Ctrl-C: stopped at once, without a final checkpoint"


class SlipstreamError(Exception):
    """An error for the user. `str(error)` is the whole message; `exit_code` ends the process."""

    exit_code = ExitCode.BUG


class ConfigError(SlipstreamError):
    exit_code = ExitCode.CONFIG


class DatasetError(SlipstreamError):
    exit_code = ExitCode.DATASET


class DataFailuresError(SlipstreamError):
    exit_code = ExitCode.DATA_FAILURES


class NoSignalError(SlipstreamError):
    exit_code = ExitCode.NO_SIGNAL


class NotFiniteError(SlipstreamError):
    exit_code = ExitCode.NOT_FINITE


class NoAnswerError(SlipstreamError):
    exit_code = ExitCode.NO_ANSWER


class NoResourcesError(SlipstreamError):
    exit_code = ExitCode.NO_RESOURCES


class EngineError(SlipstreamError):
    exit_code = ExitCode.ENGINE


class RankLostError(SlipstreamError):
    exit_code = ExitCode.RANK_LOST


class DeviceError(SlipstreamError):
    exit_code = ExitCode.DEVICE


class EndpointInUseError(SlipstreamError):
    exit_code = ExitCode.ENDPOINT_IN_USE


def access_fix(error: OSError) -> str:
    """Return what helps against an error of the system about a file."""
    if isinstance(error, PermissionError):
        return "the user that the daemon runs as must be able to"
    return "look at the disk or the network share that it is on"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch raised this because its device has no memory, in the words of its allocator and of CUDA itself."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def is_device_failure(error: BaseException) -> bool:
    """Return whether torch raised this because its device has no memory, or failed."""
    return is_out_of_memory(error) or (
        "torch" in sys.modules and isinstance(error, sys.modules["torch"].AcceleratorError)
    )


def cannot_listen(error: OSError, place: str, key: str, fix: str, host_key: str = "") -> SlipstreamError:
    """Return why a socket could not be bound. `key` is that of the place and `host_key` that of the address, where it is
    another one; `fix` is for a place that another process has."""
    if error.errno in (errno.EADDRINUSE, errno.EAGAIN):  # the second from the lock beside an ipc endpoint
        return EndpointInUseError(f"{key}: {place} is in use by another process. {fix}")
    return ConfigError(f"{host_key or key}: cannot listen at {place}: {error.strerror or error}")


class JournalError(SlipstreamError):
    exit_code = ExitCode.JOURNAL


class StalledError(SlipstreamError):
    exit_code = ExitCode.STALLED


class BundleError(SlipstreamError):
    exit_code = ExitCode.BUNDLE


class BundleChangedError(BundleError):
    """The trainer has another bundle than the one that this producer runs."""


class IncompatiblePeerError(SlipstreamError):
    exit_code = ExitCode.INCOMPATIBLE_PEER


class PolicyRefusedError(SlipstreamError):
    exit_code = ExitCode.POLICY_REFUSED


REFUSED_FIX = "Repair what the reason names (docs/alerts.md, SwapRefused) and start the producer again"


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# What it raises for values that it cannot write: text with half a character, integers of more than 64 bits, types of others,
# bytes of 4 GiB.
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError)
