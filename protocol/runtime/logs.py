"""Logging of both daemons, to standard error: text for people, or JSON for programs.

Guarantee: a record is one line of valid JSON, or text without control characters whose further lines are indented, whatever peers
and libraries put into it. No environment variable is logged. A `Throttle` shows the first few lines of a kind, then at most one
per interval with the number of those left out, and all of them under `log_level: debug`. A log that is kept in a file waits for
no disk, and has at most two files of 16 MiB.

A caller adds columns with `extra={"fields": {...}}`; only JSON shows them.
"""

import atexit
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any, Literal

from protocol.runtime.json_lines import RotatedLines, encode_line

_OUR_PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream_extras")
_MAX_CHARS = 8192  # of a message or traceback under JSON: journald splits lines above 48 KiB
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in b"\t\n"}
_SYSLOG_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_MAX_KEPT_BYTES = 16 * 2**20  # of one file
_MAX_WAITING = 1000  # records for a disk that stands still
_LOOK_EVERY_S = 0.01

_context: dict[str, Any] = {}


def configure(role: str, level: str = "info", log_format: Literal["auto", "text", "json"] = "auto") -> None:
    """Set logging up, or anew. `role` is the daemon's name and `level` that of our own packages; others log warnings and
    errors only. `auto` is JSON where standard error goes to systemd's journal, and text elsewhere."""
    to_journal = running_under_systemd()
    as_json = log_format == "json" or (log_format == "auto" and to_journal)
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(role, to_journal) if as_json else _TextFormatter(role))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(as_json)
    for package in _OUR_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that the trainer does without


def keep(path: Path) -> None:
    """Write every later record of this process to the end of `path`, too, as text with dates.

    Records are left out while the disk is full, or where a thousand of them wait for it. A process that this one forks writes
    to its standard error alone.
    """
    handler = _KeptHandler(queue.Queue(_MAX_WAITING))
    handler.setFormatter(_TextFormatter("", "%Y-%m-%d %H:%M:%S"))
    writer = QueueListener(handler.queue, _FileHandler(path))
    writer.start()
    atexit.register(writer.stop)
    root = logging.getLogger()
    root.addHandler(handler)
    os.register_at_fork(after_in_child=lambda: root.removeHandler(handler))


def note(text: str) -> None:
    """Add a line for people, which was shown without logging, to the log that is kept."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _KeptHandler):
            handler.handle(logging.makeLogRecord({"levelname": "INFO", "msg": text}))


def wait_until_written() -> None:
    """Wait until the log that is kept has all records, without taking a lock."""
    waiting = [handler.records for handler in logging.root.handlers if isinstance(handler, _KeptHandler)]
    while any(records.unfinished_tasks for records in waiting):
        time.sleep(_LOOK_EVERY_S)


class _KeptHandler(QueueHandler):
    def __init__(self, records: "queue.Queue[Any]") -> None:
        super().__init__(records)
        self.records = records

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.records.put_nowait(record)


class _FileHandler(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = RotatedLines(path, _MAX_KEPT_BYTES)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the same line is on standard error
            self._file.append(f"{record.msg}\n".encode(errors="replace"))


def bind(**context: Any) -> None:
    """Add values such as `run` and `version` to every later record of this process. None removes one."""
    _context.update(context)


def bound(name: str) -> Any:
    """Return a value that was bound, or None."""
    return _context.get(name)


def structured() -> bool:
    """Return whether records are JSON, so that no line for people may bypass logging."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)


def adopt_libraries() -> None:
    """Libraries that are imported by now (vLLM, transformers) lose their own handlers and log through ours."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(type(it) is logging.StreamHandler for it in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str, time_format: str = "%H:%M:%S") -> None:
        super().__init__(f"%(asctime)s {role} %(levelname)s %(message)s".replace("  ", " "), time_format)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip().translate(_UNPRINTABLE).replace("\n", "\n    ")


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str, with_priority: bool) -> None:
        super().__init__()
        self._role = role
        self._with_priority = with_priority  # of syslog: journald takes it off the line and files it under PRIORITY

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            **{name: value for name, value in list(_context.items()) if value is not None},
            "logger": record.name,
            "msg": _message(record)[:_MAX_CHARS],
        }
        if record.exc_info:
            values["exc"] = self.formatException(record.exc_info)[-_MAX_CHARS:]
        fields = getattr(record, "fields", None)
        line = encode_line({**values, **fields, **values} if isinstance(fields, dict) else values)
        return f"<{_SYSLOG_PRIORITIES.get(record.levelname, 6)}>{line}" if self._with_priority else line


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage().rstrip()
    except Exception:  # arguments that do not fit the format: logging would print a traceback of its own
        return f"{record.msg} {record.args!r}"


@dataclass
class _Kind:
    num_shown: int = 0
    num_left_out: int = 0  # since the last one shown
    shown_at: float = 0.0


@dataclass
class Throttle:
    """Call it with a kind and a text. `num_at_once` lines of a kind are shown whenever they come, then one in
    `then_every_s`."""

    logger: logging.Logger
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    num_at_once: int = 5
    then_every_s: float = 60.0

    def __post_init__(self) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)
        self._lock = threading.Lock()

    def __call__(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        with self._lock:
            now, seen = self.clock(), self._kinds[kind]
            if seen.num_shown >= self.num_at_once and now - seen.shown_at < self.then_every_s:
                seen.num_left_out += 1
                self.logger.debug("%s", text)
                return
            left_out = f" ({seen.num_left_out} more of this kind were left out)" if seen.num_left_out else ""
            fields = {"kind": kind, "num_left_out": seen.num_left_out}
            seen.num_shown += 1
            seen.num_left_out, seen.shown_at = 0, now
        self.logger.log(level, "%s%s", text, left_out, extra={"fields": fields})


def running_under_systemd(descriptor: int = 2) -> bool:
    """Return whether this stream (standard error by default) goes to the journal, by systemd.exec(5)'s JOURNAL_STREAM."""
    try:
        facts = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"
