"""A process that has imported a daemon's heavy libraries and forks one child per start of the daemon.

Guarantee: a child is the leader of a session of its own, as a daemon started by hand; it runs the real command with the
arguments it was given and ends as the real command does. It dies with the zygote, and the zygote with its starter. Every
end is reported once, with its status. Run as `python -m campaigns.chaos.zygote MODULE STARTER_PID`, with requests on standard
input and reports on standard output, one JSON object a line; MODULE has `preload()`, and `main(request)` for the child, unless
the request names another module as its `child`. A request may set variables of its `environment`, and name files for its
`input` and `errors`.

With the name of an abstract socket as third argument it has several users: each that connects gets a fork that is a zygote of
its own, with the connection in place of input and output, and that ends with the connection. It itself ends with the process
of STARTER_PID, whether or not that one has started it, and at once where the name is taken.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from typing import Any, TextIO

from protocol.runtime.processes import die_with_parent

_POLL_S = 0.5


def main() -> int:
    starter, name = int(sys.argv[2]), sys.argv[3:]
    if name:
        users = socket.socket(socket.AF_UNIX)
        try:
            users.bind(f"\0{name[0]}")
        except OSError:
            return 0
        users.listen()
    else:
        die_with_parent(starter)
    atexit.register(_quieten_libraries)
    gc.disable()
    child = importlib.import_module(sys.argv[1])
    child.preload()
    gc.enable()
    gc.collect()
    gc.freeze()  # a fork would look at all of it again and again, and once more at its end, and copy the pages for that
    if name:
        _fork_for_each(users, starter)
    request = _serve()
    if request is None:
        os._exit(0)  # it has nothing to tidy up, and looking through all that it has imported takes a second
    if "child" in request:
        child = importlib.import_module(request["child"])
    return child.main(request)


def _quieten_libraries() -> None:
    """The last of what runs at the exit. Libraries in C then report as leaked what is frozen; Python still writes to the log."""
    sys.stderr = sys.__stderr__ = os.fdopen(os.dup(2), "w", buffering=1)  # type: ignore[misc]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _fork_for_each(users: socket.socket, starter: int) -> None:
    """Returns in the forks."""
    watched, own = os.pidfd_open(starter), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while watched not in select.select([users.fileno(), watched], [], [])[0]:
        connection, _ = users.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        is_own = struct.unpack("3i", credentials)[1] == os.getuid()
        if is_own and os.fork() == 0:
            die_with_parent(own)
            for target in (0, 1):
                os.dup2(connection.fileno(), target)
            for descriptor in (connection, users):
                descriptor.close()
            os.close(watched)
            return
        connection.close()
    os._exit(0)


def _serve() -> dict[str, Any] | None:
    """Forks children until standard input ends (None). In a child: its request."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    _report(reports, ready=True)
    requests = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [], _POLL_S)
        if woken in ready:
            os.read(woken, 4096)
        _reap(reports)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return None
        *lines, requests = (requests + data).split(b"\n")
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wake, reports.fileno()):
                    os.close(descriptor)
                _become_daemon(request, parent)
                return request
            _report(reports, started=request["id"], pid=pid)


def _become_daemon(request: dict[str, Any], parent: int) -> None:
    os.setsid()
    die_with_parent(parent)
    writes = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    streams = (
        os.open(request.get("input", os.devnull), os.O_RDONLY),
        os.open(request["log"], writes, 0o644),
        os.open(request.get("errors", request["log"]), writes, 0o644),
    )
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    sys.argv = request["argv"]
    os.environ |= request.get("environment", {})  # what the imports have set stays, as in a process that imports itself
    tempfile.tempdir = None  # it is read from the environment once


def _reap(reports: TextIO) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _report(reports, ended=pid, status=os.waitstatus_to_exitcode(status))


def _report(reports: TextIO, **fields: Any) -> None:
    reports.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    sys.exit(main())
