"""Tables for people and JSON for programs, as `slipstream journal` writes them.

Guarantee: what came over the wire cannot move the cursor or forge a line; JSON is always valid (no NaN); tables of any
length are written in bounded memory.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any

from protocol.runtime.json_lines import encode_line

_ROWS_AT_ONCE = 500


def write_line(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")


def write_json(value: Any) -> None:
    write_line(encode_line(value))


def write_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> None:
    """Write aligned columns. A long table is written in parts, and its columns only grow. `right` names the columns that
    hold numbers."""
    to_the_right = [name in right.split() for name in header]
    widths = [0] * len(header)
    lines = chain([header], ([printable(cell) for cell in row] for row in rows))
    while part := list(islice(lines, _ROWS_AT_ONCE)):
        widths = [max(width, *map(len, cells)) for width, cells in zip(widths, zip(*part, strict=True), strict=True)]
        for row in part:
            cells = zip(row, widths, to_the_right, strict=True)
            write_line(
                "  ".join(f"{cell:>{width}}" if end else f"{cell:<{width}}" for cell, width, end in cells).rstrip()
            )


def printable(text: str, keep: str = "") -> str:
    """`text` with escapes for every character that is not printable, but those in `keep`."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def clock(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(num_bytes: int) -> str:
    from rich.filesize import pick_unit_and_suffix

    unit, name = pick_unit_and_suffix(num_bytes, ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{num_bytes} B" if name == "B" else f"{num_bytes / unit:.1f} {name}"


def number(value: float | None) -> str:
    """The number with three digits behind the point, or `-` if there is none."""
    return "-" if value is None or value != value else f"{value:.3f}"


def plain(values: Any) -> Any:
    """Return the same lists with None in place of NaN."""
    if isinstance(values, list):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and values != values else values


def span(first: int | None = None, last: int | None = None) -> str:
    if first is None:
        return "-"
    return f"{first}" if first == last else f"{first}-{last}"


def span_of_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def with_progress(groups: Iterable[Any], total: int) -> Iterator[Any]:
    """Yield the same groups, with a progress bar on standard error if that is a terminal."""
    from tqdm import tqdm

    yield from tqdm(groups, total=total, unit="group", disable=not sys.stderr.isatty(), leave=False)


_LEVELS = "▁▂▃▄▅▆▇█"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"


def rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.{1 if per_second < 10 else 0}f}/s"


def three_digits(value: float) -> str:
    return f"{value:.3g}"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw one character per value, whose height is between the smallest and the greatest of `values`. If there are more
    than `width` of them, neighbours share a character."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round((value - low) / (high - low) * steps) if high > low else steps // 2] for value in values
    )


def shortened(text: str, width: int) -> str:
    """`text` without its middle if it is too long, because names differ at their end."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
