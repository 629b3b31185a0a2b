"""The lines of daemons, above one line that changes, on whatever shows them: a terminal, a notebook, or a file.

Guarantee: what is shown cannot move the cursor, and a reader that ended, or a full disk, does not end the run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from slipstream.tables import printable

_COLOURS = {"trainer": "cyan", "producer": "magenta", "": "bold"}
_EVERY_S, _SELDOM_S = 1.0, 30.0


def pause_s(console: Console) -> float:
    """Return how long a line lasts before the next one takes its place, or comes below it."""
    return _EVERY_S if console.is_terminal or console.is_jupyter else _SELDOM_S


@contextmanager
def last_line(console: Console) -> Iterator[tuple[Callable[[str, str], None], Callable[[str], None]]]:
    """Give two functions: one shows a daemon's line, the other replaces the line below all others."""

    def show(name: str, line: str) -> None:
        text = line.rstrip().rpartition("\r")[2]  # a bar that draws itself anew
        with suppress(OSError):
            if text:
                prefix = f"{name or 'slipstream':<10} | "
                console.print(Text.assemble((prefix, _COLOURS[name]), printable(text, keep="\t")))

    if console.is_jupyter:
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        yield show, lambda text: shown.update({"text/plain": text}, raw=True)
    elif console.is_terminal:
        with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
            yield show, lambda text: live.update(Text(text, "bold", no_wrap=True, overflow="ellipsis"), refresh=True)
    else:
        yield show, lambda text: show("", text)
