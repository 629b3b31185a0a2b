"""`slipstream cluster status` shows the daemons, their nodes, and their own numbers.

Guarantee: it reads. The numbers are those of slipstream status, from the daemons' own documents, wherever they were placed.
"""

import io
import sys
import time

import msgspec
from rich.console import Console

from slipstream.tables import clock, printable, write_json, write_line, write_table
from slipstream_extras.ray.plan import DaemonReport, FleetReport


def show(report: FleetReport, *, as_json: bool = False) -> None:
    if as_json:
        write_json(msgspec.to_builtins(report))
        return
    from slipstream.status.reading import read
    from slipstream.status.render import render
    from slipstream.status.warnings import warnings
    from slipstream_extras.ray.scaling import answers

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    write_table(
        ("daemon", "is", "node", "pid", "starts", "since", "last exit"), map(_row, report.daemons), "pid starts"
    )
    for line in (*report.unreachable, *([f"no room: {report.missing}"] if report.missing else [])):
        write_line(printable(line))
    bounds = f" (between {report.plan.least} and {report.plan.most})" if report.plan.most else ""
    write_line(f"producers wanted: {report.wanted}{bounds}")
    if any(daemon.status for daemon in report.daemons):
        view = read([answers(report.daemons, time.time())])
        console = Console()
        console.print(render(view, warnings(view), console.width))


def _row(daemon: DaemonReport) -> tuple[str, ...]:
    phase = "draining" if daemon.draining and not daemon.is_over else daemon.phase
    code = "" if daemon.exit_code is None else str(daemon.exit_code)
    return daemon.name, phase, daemon.node, str(daemon.pid or ""), str(daemon.starts), clock(daemon.since), code
